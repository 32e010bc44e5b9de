"""Commands that start, set and stop a server."""
