"""What engines of every kind share about KV blocks."""
