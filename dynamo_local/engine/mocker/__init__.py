"""An engine without a model: real scheduling of a pretended KV cache, for fleets, faults and simulation.

    settings    what can be configured
    tokens      which token follows a context; the oracle of tests
    sampling    what a request asks for
    blocks      the KV block pool: prefix cache, references, eviction
    sequence    one request on its way
    scheduler   what each step computes, admits, preempts and emits
    logprobs    log-probabilities of the right shape
    engine      the above in time, as a `core.ports.Engine`

All but `engine` are pure: no clock, no I/O. Nothing here imports vLLM, torch or numpy; comments say where
vLLM's behaviour is copied.
"""
