"""KV blocks of a vLLM engine: identity, leases, and reads by other engines."""
