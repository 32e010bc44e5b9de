"""A running server from outside: its processes by what they are, its statefile, and what `dynamo ps` says of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness.accounting import Process, descendants
from benchmarks.harness.servers import Server
from dynamo_local.process.forkserver.protocol import SPARE_MODULE

Row = dict[str, Any]
"""Of `dynamo ps --json`."""

WORKER_ROLES = ("aggregated", "decode", "prefill")
_LAUNCHER = "dynamo_local.process.forkserver.launcher"
_PREPARED = "dynamo_local.process.forkserver.prepared.process"
_STAND_IN = "dynamo_local.supervisor.circus.adopted"
"""For circusd, of a process that another one has started."""
_WORKER = "--service VllmWorker"
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
    """The processes of one server. `project`: the checkout whose `dynamo` is asked."""

    def __init__(self, server: Server, project: Path) -> None:
        self._server = server
        self._project = project

    @property
    def ended(self) -> bool:
        """Whether the server has, by itself."""
        return self._server.popen.poll() is not None

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
        output = await self._server.dynamo("ps", "--json", project=self._project, within_s=_PS_WITHIN_S)
        if output is None:
            return None
        rows: list[Row] = json.loads(output)
        return rows


def all_ready(rows: Sequence[Row] | None) -> bool:
    """Whether each process says so."""
    return rows is not None and bool(rows) and all(row["state"] in ("ready", "stopped") for row in rows)


def running(rows: Sequence[Row] | None) -> list[int]:
    """Requests that each ready worker runs."""
    workers = [row for row in rows or () if row["role"] in WORKER_ROLES and row["state"] == "ready"]
    return [(row["load"] or {}).get("running") or 0 for row in workers]


def _part_of(process: Process) -> str | None:
    command = _command(process.pid)
    if _STAND_IN in command:
        return None
    if _LAUNCHER in command:
        return "launcher" if _WORKER in command else None
    if _PREPARED in command:
        return "prepared"
    if SPARE_MODULE in command:
        return "spare"
    return _PARTS.get(process.role)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
