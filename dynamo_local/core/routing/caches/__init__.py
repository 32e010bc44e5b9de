"""Which worker has which blocks cached, and how that is told: keys of blocks, the index, prefixes that come. Pure."""
