"""Calls of service endpoints over the bus, with streamed answers."""
