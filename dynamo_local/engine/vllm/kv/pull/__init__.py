"""Prefix pull: an engine reads KV blocks that another one has cached."""
