"""KV blocks, as far as engines of every kind treat them alike."""
