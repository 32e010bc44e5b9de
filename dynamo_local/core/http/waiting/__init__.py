"""Requests that wait for a model to have a worker, and which models are woken for them."""
