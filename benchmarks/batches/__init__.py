"""Batches beside the requests of people."""
