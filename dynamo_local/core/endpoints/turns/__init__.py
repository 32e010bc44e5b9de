"""Turns of endpoints on devices that are fewer than they. Pure."""
