"""Importing this imports vLLM and the services themselves, so that a forked process imports nothing.

Nothing here starts a thread, connects to anything or looks at a GPU: neither survives a fork.
"""

from __future__ import annotations

import importlib

from dynamo_local.engine.vllm.preload import READ_LATER, settle, unfit

__all__ = ["READ_LATER", "settle", "unfit"]

_SERVICES = ("components.frontend.service", "components.workers.worker")

for _name in _SERVICES:
    importlib.import_module(_name)
