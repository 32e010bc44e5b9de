"""Calls of `@endpoint`s of other services over the bus, with streamed replies."""
