"""Limits that hold for all frontends of a server together: the file in which they count."""
