"""What the services that need vLLM have the fork server import for them (preload.py), beside vLLM itself."""

from __future__ import annotations

PRELOAD = f"{__name__}.preload"
"""Module to import before a service is forked (`@service(preload=...)`)."""
