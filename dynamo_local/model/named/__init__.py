"""Models that come by name.

names.py                            the names, and their folders
random_model.py                     `random`: made here, nothing is downloaded
smollm2.py, gguf_conversion.py      `smollm2`: fetched as a Python package, converted once
"""
