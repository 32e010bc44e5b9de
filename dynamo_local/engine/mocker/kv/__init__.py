"""The mocker's KV cache: blocks, prefix cache, pins, and reads by other workers."""
