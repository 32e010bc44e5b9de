"""Repairs the files of a running server when they are damaged or removed, and clears what its dead processes leave.

Statefile, lock, and the files that processes and commands read are written anew. Sockets cannot be: when those of
circusd are gone, circusd is replaced, and the next one makes its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dynamo_local.core.errors import NotRunningError, StateError
from dynamo_local.supervisor.server.reports import logs
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from dynamo_local.tasks import finish
from state.files import free_bytes, make_private_directory, replace_file, system_errors
from state.locks import ServerLock
from state.paths import Sockets, StatePaths
from state.remains import reap
from state.statefile.store import StateStore

_EVERY_S = 1.0


@dataclass
class ServerFiles:
    """The files of one server. `store`: the one that it reads and writes its statefile with.

    `revisions`: the revisions that there are; each has a graph file. `on_healed`: called when the statefile
    was written anew and circusd can be reached; the file may then be a second out of date. `on_unreachable`: called
    when circusd's sockets were removed.
    """

    store: StateStore
    sockets: Sockets
    lock: ServerLock
    report: Report
    revisions: Callable[[], Collection[str]] = tuple
    on_healed: Callable[[], None] = lambda: None
    on_unreachable: Callable[[], None] = lambda: None
    _files: dict[Path, bytes] = field(default_factory=dict, init=False, repr=False)
    _reachable: bool = field(default=False, init=False)
    """Whether circusd's socket was there at the last look. False until it starts."""
    _healed: bool = field(default=False, init=False)
    """Whether the statefile was written anew, and `on_healed` is still to be called."""
    _sockets_lost: bool = field(default=False, init=False)
    _unrepaired: ReportOnce = field(init=False)

    def __post_init__(self) -> None:
        self.paths = self.store.paths
        self._unrepaired = ReportOnce(self.report)

    async def run(self) -> None:
        """Repair once a second until cancelled. Raises NamespaceBusyError when another server has replaced this one."""
        # A thread of its own: those of the pool may all be waiting for what is to be repaired.
        own = ThreadPoolExecutor(1, "repair")
        while True:
            # At the end of the server it must not write files that are about to be removed.
            await finish(asyncio.get_running_loop().run_in_executor(own, self.repair))
            if self._sockets_lost:
                self._sockets_lost = False
                self.on_unreachable()
            await asyncio.sleep(_EVERY_S)

    def remember(self) -> None:
        """Read now what the server has just written, so that it can be repaired. Blocks for milliseconds."""
        # The next round repairs, and reports, what cannot be read now.
        for step in (self.store.read, self._read_files):
            _failure(step)
        self._reachable = self.sockets.circus.exists()

    def repair(self) -> None:
        """Repair everything once. Blocks for milliseconds."""
        steps = (self._repair_directories, self._repair_files, self._repair_state, self._check_sockets, self._reap)
        failures = [failure for step in steps if (failure := _failure(step)) is not None]
        self._unrepaired.note(f"the server's files cannot be kept in order: {'; '.join(failures)}" if failures else "")

    def _repair_directories(self) -> None:
        gone = not self.paths.run_dir.exists()
        for directory in (self.paths.root, self.paths.run_dir, self.paths.logs_dir, self.sockets.directory):
            make_private_directory(directory)
        self.lock.renew()
        if gone:
            self.report.step(f"{self.paths.run_dir} was removed: its files are written anew")

    def _check_sockets(self) -> None:
        reachable = self.sockets.circus.exists()
        if self._reachable and not reachable:
            self.report.step("circusd's sockets were removed: another circusd takes over, which makes its own")
            self._sockets_lost = True
        self._reachable = reachable
        if reachable and self._healed:
            self._healed = False
            self.on_healed()

    def _repair_files(self) -> None:
        """Write files anew that are missing, or are no JSON any more; except the statefile."""
        paths = self.paths
        if self.sockets.directory != paths.run_dir and not paths.sockets_link.is_symlink():
            with system_errors(f"cannot create {paths.sockets_link}"):
                paths.sockets_link.symlink_to(self.sockets.directory)
        damaged = self._read_files()
        for path, contents in tuple(self._files.items()):
            if path in damaged or not path.exists():
                make_private_directory(path.parent)
                replace_file(path, contents, durable=False)

    def _read_files(self) -> set[Path]:
        """Remember what is in the files. Returns those that are damaged: what they held before is kept."""
        paths = self.paths
        known = (
            paths.record_file,
            paths.graph_file,
            paths.bus_file,
            paths.blueprint_file,
            paths.board_file,
            paths.nats_config,
            *paths.nats_tls,
            paths.circus_config,
            # Without those of revisions that are gone.
            *(paths.graph_of(revision) for revision in self.revisions()),
        )
        self._files = {path: contents for path, contents in self._files.items() if path in known}
        damaged: set[Path] = set()
        for path in known:
            contents = _read(path)
            if contents is None or contents == self._files.get(path):
                continue
            if path in self._files and not _is_whole(path, contents):
                damaged.add(path)
            else:
                self._files[path] = contents
        return damaged

    def _repair_state(self) -> None:
        damage = self.store.heal()
        if damage is not None:
            self.report.step(f"the statefile was damaged, and is written anew: {damage}")
            self._healed = True

    def _reap(self) -> None:
        reap(self.sockets)


def _read(path: Path) -> bytes | None:
    """The contents of a file; None if there is none. Raises DiskError."""
    with system_errors(f"cannot read {path}"):
        return path.read_bytes() if path.exists() else None


def _is_whole(path: Path, contents: bytes) -> bool:
    if path.suffix != ".json":
        return True
    try:
        msgspec.json.decode(contents)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True


def _failure(step: Callable[[], object]) -> str | None:
    try:
        step()
    except (StateError, NotRunningError) as error:
        return str(error)
    return None


# Keeps a running server's disk in order: rotates logs, says when the disk is full and when it has room again, and
# then has events written that were kept meanwhile.

_DISK_EVERY_S = 5.0

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
            await asyncio.sleep(_DISK_EVERY_S)
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
