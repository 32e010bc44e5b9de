"""Code that replaces parts of vLLM, PyTorch, NIXL, uvicorn and Python, a module for each part of vLLM.

`table` lists all that is replaced, with the reason, the test, and what happens without; before a patch is applied, it
compares the foreign code with that.

    frontend      vLLM's OpenAI server; metrics: of several models; http_ticks: uvicorn
    requests      requests in the engine core and in its workers; scheduler: their turns and slots
    kv            vLLM's block pool, its engine core's methods, its NIXL connector
    forks         what an engine's processes inherit; loaded_model: its weights
    tuning        for machines with few cores; the setting `cpu-tuning: false` leaves all of these out

The rest of the package assigns to no attribute of a foreign module or class; a unit test checks that.
"""
