"""An engine without a model: real scheduling of a pretended KV cache, for fleets, faults and simulation.

    settings    what can be configured
    tokens      what a request asks for, and which token follows a context; the oracle of tests
    blocks      the KV block pool (prefix cache, references, eviction), and what stands in each block, readable by
                other processes
    sequence    one request on its way, and the outcome of a step
    scheduler   what each step computes, admits, preempts and emits
    pulls       the end of a pull that keeps blocks, and the end that reads them
    engine      the above in time, as a `core.ports.Engine`

All but the blocks' memory, `pulls` and `engine` are pure: no clock, no I/O. Nothing here imports vLLM, torch or
numpy; comments say where vLLM's behaviour is copied.

**KV that is where it does not belong shows.** A block's content is a digest of all that it was computed from, a pull
copies what stands in the source's blocks when the read is over, and a token depends on what the blocks hold. So if a
block is reused while somebody reads it, or found before it is written, wrong tokens come out, here and for every
later request with that prefix.
"""
