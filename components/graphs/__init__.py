"""Graphs of `dynamo serve MODEL`, one in each module.

They stand here and not in examples/, so that a folder `examples` of the user's cannot take their place.
"""
