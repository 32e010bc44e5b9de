"""Requests at a worker: their admission, tokens, events and ends."""
