"""Batches: ordered by clients, run line by line behind everybody else."""
