"""Engines: one port (core/ports.py), the real one (vllm/) and one for fleets and faults (mocker/).

An engine turns submissions into tokens. It knows nothing of buses, leases or routing; a worker component joins it
to them. vLLM and torch are imported in `vllm/` and nowhere else.
"""
