"""Imports the NATS client without its WebSockets. Modules that import the client import this one before it."""

from __future__ import annotations

import importlib
import sys


def _import_without_websockets() -> None:
    """Import the NATS client without aiohttp, which it imports for WebSockets alone. They are not used here, and the
    import would take half of the time of a command such as `dynamo requests`."""
    hidden = "aiohttp" not in sys.modules
    if hidden:
        # None: an import of that name fails, as if the package were not installed.
        sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("nats.aio.transport")
    finally:
        if hidden:
            del sys.modules["aiohttp"]


_import_without_websockets()
