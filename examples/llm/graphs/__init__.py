"""Graphs, one in each module: the services and their links."""
