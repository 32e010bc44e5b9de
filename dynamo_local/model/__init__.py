"""Models: where one comes from, what is known of it before it is loaded, and what is wrong with it.

    obtain.py              a folder, or a model of the hub, checked and made ready
    facts.py, weights.py   what a model's files say
    check.py               what is wrong with them
    cache.py               the folder where models are kept
    named/                 models that come by name: smollm2, random, quickstart
    hub/                   models of the Hugging Face Hub

Nothing here imports vLLM, torch or transformers into the process that asks.
"""
