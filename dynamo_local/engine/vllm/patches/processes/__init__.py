"""Patches of Python's standard library in the processes of an engine."""
