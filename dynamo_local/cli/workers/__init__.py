"""Commands that change the workers of a running server."""
