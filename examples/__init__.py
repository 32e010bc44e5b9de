"""Example graphs to start from."""
