"""One module a graph: which services, linked how."""
