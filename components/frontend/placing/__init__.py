"""Which worker a request gets."""
