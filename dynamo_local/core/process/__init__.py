"""Decisions about processes: restarts, stalls, cores. Pure."""
