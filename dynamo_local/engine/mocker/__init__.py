"""An engine without a model: real scheduling of a pretended KV cache, for fleets, faults and simulation.

    settings    what can be configured
    tokens      which token follows a context; the oracle of tests
    sampling    what a request asks for
    blocks      the KV block pool: prefix cache, references, eviction
    memory      what stands in each block, readable by other processes
    contents    what blocks are given to hold, and what tokens make of it
    sequence    one request on its way
    outcome     one step of the scheduler
    scheduler   what each step computes, admits, preempts and emits
    logprobs    log-probabilities of the right shape
    pulling     what the two ends of a pull agree on
    source      the end that keeps blocks
    reading     the end that reads them
    engine      the above in time, as a `core.ports.Engine`

All but `memory`, `source`, `reading` and `engine` are pure: no clock, no I/O. Nothing here imports vLLM, torch or
numpy; comments say where vLLM's behaviour is copied.

**KV that is where it does not belong shows.** A block's content is a digest of all that it was computed from, a pull
copies what stands in the source's blocks when the read is over, and a token depends on what the blocks hold. So if a
block is reused while somebody reads it, or found before it is written, wrong tokens come out, here and for every
later request with that prefix.
"""
