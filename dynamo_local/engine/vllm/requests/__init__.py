"""Requests between the bus and vLLM: types, continuation, fidelity, faults, adapters."""
