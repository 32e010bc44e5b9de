"""Prefill on workers of its own: latency of decoding streams, the prefill queue, pulling KV from another engine."""
