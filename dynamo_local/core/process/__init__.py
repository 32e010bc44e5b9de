"""Decisions about processes: restarts, stalled engines, CPU cores. Pure: what was observed, and the time, come in as
arguments."""
