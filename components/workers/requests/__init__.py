"""The requests of a worker: admission to the engine, sending their tokens, events, counters."""
