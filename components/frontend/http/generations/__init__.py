"""Requests that generate: whether they may come, where they wait for a worker, and how they reach their model."""
