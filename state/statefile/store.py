"""The statefile on disk: atomic, locked, mode 0600.

Readers take no lock: they see one whole version. Writers exclude each other by a lock that exists as long as the
statefile does. Each update is written to a copy in the run directory first. If the statefile is damaged or removed
while a server runs, the copy is read and updated until the server has written the statefile anew (`heal`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from dynamo_local.core.errors import DynamoError, NotRunningError, StateError
from dynamo_local.core.names import LOCAL_NODE
from state.files import DISK, Disk, DiskError, make_private_directory, replace_file, system_errors
from state.locks import Clock, FileLock, server_pid
from state.paths import StatePaths
from state.statefile.model import Owner, State, decode, encode

LOCK_TIMEOUT_S = 10.0
"""An update takes milliseconds; a process that holds the lock for this long is stopped or stuck."""

HEALED_WITHIN_S = 3.0
"""For the server, which checks its files every second, to write the statefile anew if the copy is gone, too."""

_POLL_S = 0.05

_T = TypeVar("_T")


class UnreadableError(DiskError):
    """The statefile cannot be read, or is not one of the namespace."""


class StateStore:
    """Create, read, update and remove the statefile of one namespace on one node. Safe from any thread and process of
    the node.

    A statefile of another node, which may lie here on a file system that machines share, can be read, and is neither
    written nor removed: what it says of pids and devices is not true here.

    A store remembers the state that it has read or written last. The server has one for as long as it runs, which
    makes up for statefile and copy when both are lost.
    """

    def __init__(
        self,
        paths: StatePaths,
        *,
        node: str = LOCAL_NODE,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        disk: Disk = DISK,
        clock: Clock | None = None,
    ) -> None:
        self.paths = paths
        self._node = node
        self._lock_timeout_s = lock_timeout_s
        self._disk = disk
        self._clock = clock
        self._decoded: tuple[bytes, State] | None = None
        """What was read or written last. To read again is cheap while nothing changes."""
        self._owner: Owner | None = None
        """Of the state that this store has created."""

    def create(self, state: State) -> None:
        """Write the first version. Raises StateError if a statefile exists."""
        self._check_namespace(state)
        self._check_node(state)
        make_private_directory(self.paths.root)
        with self._locked():
            if self._exists():
                raise StateError(
                    f"{self.paths.statefile} already exists",
                    "it is left from a crash; start the server again",
                )
            data = encode(state)
            self._write_copy(data)
            replace_file(self.paths.statefile, data, self._disk)
            self._owner = state.owner

    def read(self) -> State:
        """Read the current version. Raises NotRunningError if there is none, UnreadableError if it cannot be read; each
        only after a running server had time to write it anew."""
        return self._with_retries(lambda: self._version()[0])

    def read_file(self) -> State:
        """Read the statefile itself, not its copy. Raises as `read`, but at once."""
        return self._read(self.paths.statefile)

    def update(self, change: Callable[[State], State]) -> State:
        """Replace the state by `change(state)` and return it. No other update happens in between.

        `change` must be pure and quick, as it runs under the lock, and may run again. If it raises, nothing is written
        and the error passes through. Raises as `read`, LockTimeoutError (a StateError that names the holder), and
        StateError for the state of another server, if this store has created its own.
        """
        return self._with_retries(lambda: self._update(change))

    def heal(self) -> str | None:
        """Write the statefile anew if it is damaged or missing: from its copy, or else as this store remembers it.

        For the server only, which knows that the file must exist. Returns what was wrong with the file, or None. Raises
        as `read`, but at once, if there is no copy, and nothing is remembered.
        """
        with suppress(NotRunningError, UnreadableError):
            self.read_file()
            return None
        with self._locked():
            try:
                state, damage = self._version()
            except (NotRunningError, UnreadableError) as error:
                if self._decoded is None:
                    raise
                state, damage = self._decoded[1], _damage(error)
            if damage is not None:
                data = encode(state)
                self._write_copy(data)
                replace_file(self.paths.statefile, data, self._disk)
            return damage

    def remove(self) -> None:
        """Remove the statefile, its copy and lock, and what an interrupted write has left. Harmless without one."""
        if not self.paths.root.exists():
            return
        with self._locked(), system_errors(f"cannot remove {self.paths.statefile}"):
            self.check_own()
            # The copy first: without the statefile it would be read in its place.
            for path in (self.paths.state_copy, self.paths.statefile):
                path.unlink(missing_ok=True)
                path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)

    def check_own(self) -> None:
        """Raise StateError if the statefile is that of another node. One that cannot be read is nobody's."""
        with suppress(NotRunningError, UnreadableError):
            self._check_node(self.read_file())

    def set_aside(self) -> None:
        """Rename a statefile that cannot be read, so that it can be examined later."""
        with self._locked(), system_errors(f"cannot move {self.paths.statefile}"):
            self.paths.statefile.replace(self.paths.unreadable_statefile)

    def _with_retries(self, attempt: Callable[[], _T]) -> _T:
        """Try again for a while if there is a server that can write the statefile anew."""
        clock = self._clock or Clock()
        give_up_at = clock.now() + HEALED_WITHIN_S
        while True:
            try:
                return attempt()
            except (NotRunningError, UnreadableError):
                if clock.now() >= give_up_at or server_pid(self.paths) is None:
                    raise
            clock.sleep(_POLL_S)

    def _update(self, change: Callable[[State], State]) -> State:
        if not self._exists():
            raise self._not_running()
        with self._locked():
            before, damage = self._version()
            self._check_node(before)
            self._check_owner(before, self._owner or before.owner)
            after = change(before)
            self._check_namespace(after)
            self._check_node(after)
            self._check_owner(after, before.owner)
            if after != before:
                data = encode(after)
                self._write_copy(data)
                # A damaged statefile is left to the server, which reports it.
                if damage is None:
                    replace_file(self.paths.statefile, data, self._disk)
                self._decoded = data, after
            return after

    def _version(self) -> tuple[State, str | None]:
        """The current version, and what is wrong with the statefile if the copy had to be read, else None."""
        try:
            return self.read_file(), None
        except (NotRunningError, UnreadableError) as error:
            with suppress(NotRunningError, UnreadableError):
                return self._read(self.paths.state_copy), _damage(error)
            raise

    def _read(self, path: Path) -> State:
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._not_running() from error
        except OSError as error:
            raise UnreadableError(f"cannot read {path}: {error.strerror}", _REPAIR) from error
        known = self._decoded
        if known is not None and known[0] == data:
            return known[1]
        try:
            state = decode(data)
            self._check_namespace(state)
            self._decoded = data, state
            return state
        except StateError as error:
            raise UnreadableError(f"cannot read {path}: {error.cause}", error.remedy or _REPAIR) from error

    def _write_copy(self, data: bytes) -> None:
        """Write the copy, unless there is no run directory: then no server runs that could heal the statefile."""
        if self.paths.run_dir.is_dir():
            replace_file(self.paths.state_copy, data, self._disk, durable=False)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.paths.update_lock, self._clock)
        lock.acquire(self._lock_timeout_s)
        try:
            yield
        finally:
            # lexists raises nothing, so the lock is released whatever happened to the directory.
            lock.release(remove=not os.path.lexists(self.paths.statefile))

    def _exists(self) -> bool:
        with system_errors(f"cannot read {self.paths.statefile}"):
            return self.paths.statefile.exists() or self.paths.state_copy.exists()

    def _check_namespace(self, state: State) -> None:
        if state.namespace != self.paths.namespace:
            raise StateError(f"the state is of namespace {state.namespace}, not {self.paths.namespace}")

    def _check_node(self, state: State) -> None:
        if state.node != self._node:
            raise StateError(
                f"{self.paths.statefile} is written by node {state.node}, and this is node {self._node}",
                "give each node a state directory of its own",
            )

    def _check_owner(self, state: State, owner: Owner) -> None:
        if state.owner != owner:
            raise StateError(
                f"{self.paths.statefile} is that of the server with pid {state.owner.pid}, not {owner.pid}",
                "this server has been replaced: end it",
            )

    def _not_running(self) -> NotRunningError:
        namespace = self.paths.namespace
        return NotRunningError(
            f"no server runs in namespace {namespace}", "start one with `dynamo serve`, or name its namespace"
        )


def _damage(error: DynamoError) -> str:
    return "it was removed" if isinstance(error, NotRunningError) else error.cause


_REPAIR = "stop the server, or start it again if none runs: it sets the file aside"
