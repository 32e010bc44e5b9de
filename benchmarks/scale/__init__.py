"""Fleets of a size that no machine here can run: what their messages and decisions cost."""
