"""Keeps a running server's disk in order: rotates logs, says when the disk is full and when it has room again, and then
has events written that were kept meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.core.errors import StateError
from dynamo_local.supervisor.server.reports import logs
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.files import free_bytes
from state.paths import StatePaths

_EVERY_S = 5.0

FULL_BELOW_BYTES = 1024 * 1024
"""A disk with less room counts as full: the statefile may still be written, and a log may not."""

ROOM_ABOVE_BYTES = 4 * FULL_BELOW_BYTES
"""Room at which a full disk has room again. More than for the other, so that the two do not alternate."""


@dataclass
class DiskUpkeep:
    """`flush`: writes what could not be written before. `on_room`: called when a full disk has room again. `free`: the
    bytes left on a folder's disk; None if not known."""

    paths: StatePaths
    report: Report
    flush: Callable[[], None] = lambda: None
    on_room: Callable[[], Awaitable[None]] | None = None
    free: Callable[[Path], int | None] = free_bytes
    _is_full: bool = field(default=False, init=False)
    _rotation: ReportOnce = field(init=False)

    def __post_init__(self) -> None:
        self._rotation = ReportOnce(self.report)

    async def run(self) -> None:
        """Look every few seconds until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            was_full = self._is_full
            await asyncio.to_thread(self.look)
            # Not in another thread: the event loop's adds events.
            self.flush()
            if was_full and not self._is_full and self.on_room is not None:
                await self.on_room()

    def look(self) -> None:
        """Look once. Blocks while a large log is copied."""
        free = self.free(self.paths.root)
        if free is not None and free < FULL_BELOW_BYTES and not self._is_full:
            self._is_full = True
            self.report.step(
                f"the disk of {self.paths.root} is full: logs and settings are not written, and workers may not start "
                "until there is room"
            )
        elif self._is_full and (free is None or free > ROOM_ABOVE_BYTES):
            self._is_full = False
            self.report.step(f"the disk of {self.paths.root} has room again")
        try:
            logs.rotate_large(self.paths.logs_dir)
        except StateError as error:
            self._rotation.note(str(error))
        else:
            self._rotation.note("")
