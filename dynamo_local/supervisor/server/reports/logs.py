"""The log files of watchers: `{watcher}.log`. Processes append to them directly. They stay when the server ends.

A process holds its log open in append mode, so a log that is too large is copied and then emptied in place; lines that
are written between the two are lost. Logs of the previous run are renamed when a server starts. Logs of processes on
other nodes are asked of the server.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import GET_LOG
from dynamo_local.core.errors import ConfigError, NotRunningError, StateError, SupervisorError
from dynamo_local.core.names import MACHINERY, Watcher, endpoint_of, parse_watcher, short_watcher
from state.files import system_errors
from state.paths import StatePaths
from state.statefile.store import StateStore

MAX_BYTES = 20 * 1024 * 1024
BACKUPS = 3
CIRCUSD_LOG = "circusd"
_SUFFIX = ".log"
_TAIL_BLOCK_BYTES = 64 * 1024
_MOST_FAR_LINES = 1000
_HARMLESS = re.compile(r"(\([^()]*pid=\d+\) )?(DEBUG|INFO|WARNING|warning:) ")
"""Begins a line, of vLLM's logs or of ours, after which a process may have been killed."""


def start_afresh(directory: Path) -> None:
    """Rename the logs of the previous run, which become backups."""
    for path in directory.glob(f"*{_SUFFIX}"):
        if path.stat().st_size > 0:
            _shift_backups(path)
            path.rename(_backup(path, 1))


def rotate_large(directory: Path, max_bytes: int = MAX_BYTES) -> None:
    """Copy and empty the logs that are larger than `max_bytes`. Raises DiskError; the logs are then as they were."""
    for path in directory.glob(f"*{_SUFFIX}"):
        with system_errors(f"cannot rotate {path}"):
            if path.stat().st_size > max_bytes:
                _rotate(path)


def _rotate(path: Path) -> None:
    copy = _backup(path, 0)
    try:
        copy.touch(0o600)
        shutil.copyfile(path, copy)
    except OSError:
        # On a full disk, what was copied would take the room that the server waits for.
        copy.unlink(missing_ok=True)
        raise
    _shift_backups(path)
    copy.replace(_backup(path, 1))
    os.truncate(path, 0)


def _backup(path: Path, index: int) -> Path:
    return path.with_name(f"{path.name}.{index}")


def _shift_backups(path: Path) -> None:
    for index in range(BACKUPS - 1, 0, -1):
        if _backup(path, index).exists():
            _backup(path, index).replace(_backup(path, index + 1))


def size(path: Path) -> int:
    """The size of a log in bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail(path: Path, lines: int, *, after: int = 0, before: int | None = None) -> list[str]:
    """The last lines of a file, at most `lines`, between two offsets in bytes. A missing file has none."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size if before is None else min(before, size)
            # A log that was emptied meanwhile may end before `after`: it is then read from its beginning.
            return _tail(file.fileno(), lines, after if after <= end else 0, end)
    except FileNotFoundError:
        return []


def _tail(descriptor: int, lines: int, first: int, end: int) -> list[str]:
    data = b""
    while end > first and data.count(b"\n") <= lines:
        start = max(first, end - _TAIL_BLOCK_BYTES)
        data = os.pread(descriptor, end - start, start) + data
        end = start
    # Not splitlines(): it also breaks lines at other characters, such as the carriage returns of progress bars.
    if not data or lines <= 0:
        return []
    return data.decode(errors="replace").removesuffix("\n").split("\n")[-lines:]


def last_error(lines: Iterable[str]) -> str | None:
    """The error of a process that failed: its last line "error: ...", else its last line unless that is a warning or
    tells of progress, else None."""
    stripped = [line.strip() for line in lines if line.strip()]
    errors = [line.removeprefix("error: ") for line in stripped if line.startswith("error: ")]
    last = stripped[-1] if stripped and not _HARMLESS.match(stripped[-1]) else None
    return errors[-1] if errors else last


def select(directory: Path, selector: str | None) -> tuple[str, ...]:
    """Names of the logs that `selector` selects: a service's, a watcher's, those of the workers of an endpoint or of
    one of its revisions, circusd's, or (None) those of all services.

    Raises NotRunningError, which names the logs there are, if there is none.
    """
    watchers = _watchers(directory)
    if selector is None:
        return tuple(name for name, watcher in watchers.items() if watcher.service not in {CIRCUSD_LOG, *MACHINERY})
    chosen = tuple(name for name, watcher in watchers.items() if selector in selectors(name, watcher))
    if not chosen:
        listed = ", ".join(map(short_watcher, watchers)) or "none"
        raise NotRunningError(f"no log of {selector!r}", f"there are: {listed}")
    return chosen


def select_of_endpoint(directory: Path, endpoint: str) -> tuple[str, ...]:
    """Names of the logs of an endpoint's workers, of all its revisions. Raises NotRunningError if there is none."""
    watchers = _watchers(directory).items()
    chosen = tuple(name for name, watcher in watchers if endpoint_of(watcher.revision) == endpoint)
    if not chosen:
        raise NotRunningError(
            f"there is no log of a worker of endpoint {endpoint!r}", "see `dynamo endpoint list` and `dynamo events`"
        )
    return chosen


def _names(directory: Path) -> list[str]:
    return sorted(path.name.removesuffix(_SUFFIX) for path in directory.glob(f"*{_SUFFIX}"))


def _watchers(directory: Path) -> dict[str, Watcher]:
    """The logs in a folder by name, each with its watcher."""
    return {name: watcher for name in _names(directory) if (watcher := _watcher(name)) is not None}


def _watcher(name: str) -> Watcher | None:
    """The watcher of a log; one of no namespace for circusd's."""
    if name == CIRCUSD_LOG:
        return Watcher("", CIRCUSD_LOG)
    try:
        return parse_watcher(name)
    except ConfigError:
        return None  # not a log of ours


def selectors(name: str, watcher: Watcher) -> set[str]:
    """What selects the log of a watcher."""
    endpoint = {watcher.revision, endpoint_of(watcher.revision)} - {""}
    return {name, watcher.service, short_watcher(name), *endpoint}


@dataclass
class Follower:
    """Reads a log as it grows, also across its rotation, in complete lines."""

    path: Path
    offset: int = 0

    def last_lines(self, lines: int) -> list[str]:
        """The last complete lines of the log as it is now. `new_lines` continues after them."""
        self.offset = _end_of_last_line(self.path)
        return tail(self.path, lines, before=self.offset)

    def new_lines(self) -> list[str]:
        """The complete lines that were added since the last call."""
        end = _end_of_last_line(self.path)
        if end < self.offset:
            self.offset = 0  # emptied meanwhile
        start, self.offset = self.offset, end
        return tail(self.path, MAX_BYTES, after=start, before=end)


def select_far(paths: StatePaths, selector: str | None) -> tuple[str, ...]:
    """Names of the processes on other nodes that `selector` selects, as `select` takes it; none where no
    server runs."""
    try:
        state = StateStore(paths).read()
    except (NotRunningError, StateError):
        return ()
    return tuple(
        entry.watcher_name
        for entry in state.components.values()
        if entry.holds
        and entry.node != state.node
        and (selector is None or selector in selectors(entry.watcher_name, entry.watcher))
    )


@dataclass
class FarFollower:
    """Reads a log on another node as it grows, as `Follower` does one here. Nothing can be read of a node
    that does not answer."""

    client: ControlClient
    watcher: str
    _offset: int | None = 0
    """None: the last lines were asked for, and no answer came."""
    _last: int = 0
    """How many of these were asked for."""

    def last_lines(self, lines: int) -> list[str]:
        """The last lines of the log as it is now: so many, and no more than fit into a message."""
        self._offset, self._last = None, lines
        return self._read(lines)

    def new_lines(self) -> list[str]:
        """The lines that were added since the last call; the last ones if that had no answer."""
        return self._read(self._last if self._offset is None else _MOST_FAR_LINES)

    def _read(self, lines: int) -> list[str]:
        query = {"lines": str(lines)} | ({} if self._offset is None else {"after": str(self._offset)})
        try:
            found: Any = self.client.do(GET_LOG, query=query, watcher=self.watcher)
        except (NotRunningError, SupervisorError):
            return []
        self._offset = found["end"]
        return list(found["lines"])


def _end_of_last_line(path: Path) -> int:
    """The offset after the last line break; 0 if there is none."""
    try:
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            while end > 0:
                start = max(0, end - _TAIL_BLOCK_BYTES)
                found = os.pread(file.fileno(), end - start, start).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                end = start
    except FileNotFoundError:
        pass
    return 0
