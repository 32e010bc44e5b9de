"""Priorities of requests: their classes, and who is served next. As in vLLM, lower numbers are served first."""
