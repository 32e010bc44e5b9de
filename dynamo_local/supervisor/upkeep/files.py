"""Keeps what a running server has on disk as it has to be, whoever damages or removes it, and clears what its dead
processes leave.

What the server knows is written anew: statefile, lock, and the files from which processes and commands learn of it.
Sockets cannot be: those of circusd are made again by another circusd, which takes over what this one runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dynamo_local.core.errors import NotRunningError, StateError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.supervisor.server.report import Report
from state.files import make_private_directory, replace_file, system_errors
from state.locks import ServerLock
from state.model import State
from state.paths import Sockets, StatePaths
from state.remains import reap
from state.store import StateStore

_LOOK_EVERY_S = 1.0


@dataclass
class ServerFiles:
    """Of one server. `members`: who is heard on the bus. `on_healed`: called when the statefile was written anew, which
    may then be a second old, and circusd can be asked what is true. `on_unreachable`: called when circusd cannot be
    asked any more."""

    paths: StatePaths
    sockets: Sockets
    lock: ServerLock
    report: Report
    members: Callable[[], list[Presence]] = list
    on_healed: Callable[[], None] = lambda: None
    on_unreachable: Callable[[], None] = lambda: None
    _state: State | None = field(default=None, init=False)
    _files: dict[Path, bytes] = field(default_factory=dict, init=False, repr=False)
    _reachable: bool = field(default=False, init=False)
    """Whether commands can talk to circusd: not yet, at first."""
    _to_compare: bool = field(default=False, init=False)
    """Whether the statefile is to be compared with what runs, once circusd can be asked."""
    _cut: bool = field(default=False, init=False)
    _said: str = field(default="", init=False)

    async def run(self) -> None:
        """Until cancelled. Raises NamespaceBusyError when another server has taken this one's place."""
        while True:
            look = asyncio.ensure_future(asyncio.to_thread(self.look))
            try:
                await asyncio.shield(look)
            except asyncio.CancelledError:
                # It must not write what is about to be removed.
                await look
                raise
            if self._cut:
                self._cut = False
                self.on_unreachable()
            await asyncio.sleep(_LOOK_EVERY_S)

    def remember(self) -> None:
        """Take note of what the server has just written, not only with the next round. Blocks for milliseconds."""
        # What cannot be read now is the next round's to mend, and to tell of.
        for step in (self._read_state, self._read_files):
            _trouble(step)
        self._reachable = self.sockets.circus.exists()

    def look(self) -> None:
        """One round of `run`. Blocks for milliseconds."""
        steps = (self._mend_directories, self._mend_files, self._mend_state, self._look_at_sockets, self._reap)
        troubles = [trouble for step in steps if (trouble := _trouble(step)) is not None]
        said = f"the server's files cannot be kept in order: {'; '.join(troubles)}" if troubles else ""
        if said and said != self._said:
            self.report.step(said)
        self._said = said

    def _mend_directories(self) -> None:
        gone = not self.paths.run_dir.exists()
        for directory in (self.paths.root, self.paths.run_dir, self.paths.logs_dir, self.sockets.directory):
            make_private_directory(directory)
        self.lock.renew()
        if gone:
            self.report.step(f"{self.paths.run_dir} was removed: what is known of it is written anew")

    def _look_at_sockets(self) -> None:
        reachable = self.sockets.circus.exists()
        if self._reachable and not reachable:
            self.report.step("circusd's sockets were removed: another circusd takes over, which makes its own")
            self._cut = True
        self._reachable = reachable
        if reachable and self._to_compare:
            self._to_compare = False
            self.on_healed()

    def _mend_files(self) -> None:
        """All but the statefile: those that are there, as they are."""
        paths = self.paths
        if self.sockets.directory != paths.run_dir and not paths.sockets_link.is_symlink():
            with system_errors(f"cannot create {paths.sockets_link}"):
                paths.sockets_link.symlink_to(self.sockets.directory)
        self._read_files()
        for path, contents in tuple(self._files.items()):
            if not path.exists():
                make_private_directory(path.parent)
                replace_file(path, contents, durable=False)

    def _read_state(self) -> None:
        self._state = StateStore(self.paths).read()

    def _read_files(self) -> None:
        paths = self.paths
        for path in (paths.graph_file, paths.bus_file, paths.blueprint_file, paths.nats_config, paths.circus_config):
            if path.exists():
                with system_errors(f"cannot read {path}"):
                    self._files[path] = path.read_bytes()

    def _mend_state(self) -> None:
        remembered = None if self._state is None else as_heard(self._state, self.members())
        self._state, damage = StateStore(self.paths).heal(remembered)
        if damage is not None:
            self.report.step(f"the statefile was damaged, and is written anew: {damage}")
            self._to_compare = True

    def _reap(self) -> None:
        reap(self.sockets)


def _trouble(step: Callable[[], None]) -> str | None:
    try:
        step()
    except (StateError, NotRunningError) as error:
        return str(error)
    return None


def as_heard(state: State, members: list[Presence]) -> State:
    """The state with lease, pid and role of its processes as they say themselves. Pure."""
    components = dict(state.components)
    for presence in members:
        known = components.get(presence.watcher)
        if known is not None and known.holds:
            components[presence.watcher] = msgspec.structs.replace(
                known, lease=presence.lease, pid=presence.pid, role=presence.role
            )
    return msgspec.structs.replace(state, components=components)
