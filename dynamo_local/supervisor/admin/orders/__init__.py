"""Orders to a running server, or to its files while none runs, and what comes of them."""
