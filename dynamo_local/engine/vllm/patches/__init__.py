"""Code that replaces parts of vLLM, PyTorch, NIXL, uvicorn and Python: one module for each thing replaced.

`table` lists every patch, with its reason and its test; `check` compares the foreign code with what the table expects
before a patch is applied.

    tuning      for machines with few cores; the setting `cpu-tuning: false` leaves all of these out
    frontend    vLLM's OpenAI server, and uvicorn
    requests    requests in the engine core and in its workers
    kv          vLLM's block pool, its engine core's methods, its NIXL connector
    processes   Python itself, in an engine's processes

The rest of the package assigns to no attribute of a foreign module or class; a unit test checks that.
"""
