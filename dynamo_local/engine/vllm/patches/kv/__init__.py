"""Patches for reading KV blocks of other engines: vLLM's block pool, engine core and NIXL connector."""
