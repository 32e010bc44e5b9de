"""Graphs to start from."""
