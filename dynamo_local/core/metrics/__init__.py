"""Metrics of several processes, put together."""
