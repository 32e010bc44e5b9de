"""Endpoints whose engines are mockers, as processes of a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.servers import Server, ServerError

READY_WITHIN_S = 240.0
_LOOK_EVERY_S = 0.2


def mocker(name: str, args: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """An endpoint with one mocker unless the fields say otherwise. `args`: settings of its frontend and workers."""
    return {"name": name, "model": str(model_folder(RANDOM)), "engine": "mocker", "args": dict(args or {}), **fields}


async def until(server: Server, *states: str) -> None:
    """Wait until the server's one endpoint is in one of the states. Raises ServerError."""
    deadline = time.monotonic() + READY_WITHIN_S
    while (state := "".join(status["state"] for status in (await server.endpoints()).values())) not in states:
        if server.ended or time.monotonic() > deadline:
            raise ServerError(f"the endpoint is {state}, not {' or '.join(states)}:\n{server.last_lines()}")
        await asyncio.sleep(_LOOK_EVERY_S)


async def all_ready(server: Server, specs: Sequence[Mapping[str, Any]]) -> float:
    """Wait until each endpoint has its least workers. Returns the seconds since the server's start.

    Raises ServerError if the server ends, or takes too long.
    """
    while not await _are_ready(server, specs):
        if server.ended:
            raise ServerError(f"the server ended:\n{server.last_lines()}")
        if time.monotonic() - server.started_at > READY_WITHIN_S:
            raise ServerError(f"endpoints are not ready after {READY_WITHIN_S:g} s:\n{server.last_lines()}")
        await asyncio.sleep(_LOOK_EVERY_S)
    took_s = time.monotonic() - server.started_at
    server.refresh()
    return took_s


async def _are_ready(server: Server, specs: Sequence[Mapping[str, Any]]) -> bool:
    statuses = await server.endpoints()
    return all(
        (status := statuses.get(spec["name"], {})).get("state") == "ready"
        and status.get("ready", 0) >= spec.get("min_workers", 1)
        for spec in specs
    )
