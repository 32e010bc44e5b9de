"""Benchmarks of asynchronous tasks."""
