"""Workloads: arrivals, lengths, prompts, traces."""
