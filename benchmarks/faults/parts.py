"""A running server from outside: its processes by what they are, and what `dynamo ps` says of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness.accounting import Process, command, descendants
from benchmarks.harness.client import ServerError
from benchmarks.harness.servers import Server

Row = dict[str, Any]
"""Of `dynamo ps --json`."""

WORKER_ROLES = ("aggregated", "decode", "prefill")
_LAUNCHER = ".launcher "
_WORKER = "--service VllmWorker"
_NAMED: Mapping[str, str | None] = {".prepared.process": "prepared", ".spare": "spare", ".adopted": None}
"""Parts that share a role with others, by what their command lines hold; None: a stand-in of circusd for a process that
another one has started."""
_PS_WITHIN_S = 30.0

_PARTS = {
    "worker host": "host",
    "EngineCore": "engine-core",
    "Worker": "engine-worker",
    "router": "router",
    "frontend": "frontend",
    "planner": "planner",
    "nats": "nats",
    "circusd": "circusd",
    "forkserver": "forkserver",
    "dynamo serve": "serve",
}
"""What accounting calls a process, and what it is called here. Launchers share their services' names there."""


class Parts:
    """The processes of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def ended(self) -> bool:
        """Whether the server has, by itself."""
        return self._server.ended

    def processes(self) -> dict[str, list[Process]]:
        """By part; of launchers, those of workers."""
        found: dict[str, list[Process]] = {}
        for process in descendants(self._server.popen.pid):
            part = _part_of(process)
            if part:
                found.setdefault(part, []).append(process)
        return found

    def counts(self) -> Counter[str]:
        """How many there are of each part."""
        return Counter({part: len(found) for part, found in self.processes().items()})

    def segments(self) -> set[Path]:
        """Shared memory that its processes map."""
        found: set[str] = set()
        for process in descendants(self._server.popen.pid):
            with suppress(OSError):
                found.update(
                    re.findall(
                        r"/dev/shm/(?:psm_|dynamo-)\S+", Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
                    )
                )
        return set(map(Path, found))

    async def rows(self) -> list[Row] | None:
        """What `dynamo ps` says; None if it fails."""
        try:
            rows: list[Row] = await self._server.dynamo("ps", within_s=_PS_WITHIN_S)
        except ServerError:
            return None
        return rows


def all_ready(rows: Sequence[Row] | None) -> bool:
    """Whether each process says so."""
    return rows is not None and bool(rows) and all(row["state"] in ("ready", "stopped") for row in rows)


def running(rows: Sequence[Row] | None) -> list[int]:
    """Requests that each ready worker runs."""
    workers = [row for row in rows or () if row["role"] in WORKER_ROLES and row["state"] == "ready"]
    return [(row["load"] or {}).get("running") or 0 for row in workers]


def _part_of(process: Process) -> str | None:
    line = command(process.pid)
    if _LAUNCHER in line:
        return "launcher" if _WORKER in line else None
    for module, part in _NAMED.items():
        if module in line:
            return part
    return _PARTS.get(process.role)
