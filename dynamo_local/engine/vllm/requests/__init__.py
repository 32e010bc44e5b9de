"""Requests between the bus and vLLM: wire (types), continuing (in new epochs), faults, lora (adapters)."""
