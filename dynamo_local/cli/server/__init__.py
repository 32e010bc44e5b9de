"""Commands that start, show and stop a server."""
