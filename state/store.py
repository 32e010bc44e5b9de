"""The statefile on disk: atomic, locked, 0600. `ServerLock` and `server_pid` are offered here too.

Readers take no lock: they see one whole version. Writers take turns under a lock that exists as long as the
statefile does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dynamo_local.core.errors import NotRunningError, StateError
from state.files import DISK, Disk, make_private_directory, replace_file, system_errors
from state.locks import Clock, FileLock, ServerLock, server_pid
from state.model import State, decode, encode
from state.paths import StatePaths

__all__ = ["ServerLock", "StateStore", "server_pid"]

LOCK_TIMEOUT_S = 10.0
"""An update takes milliseconds; whoever holds the lock for this long is stopped or stuck."""


class StateStore:
    """Create, read, update and remove the statefile of one namespace. Safe from any thread and process."""

    def __init__(
        self,
        paths: StatePaths,
        *,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        disk: Disk = DISK,
        clock: Clock | None = None,
    ) -> None:
        self.paths = paths
        self._lock_timeout_s = lock_timeout_s
        self._disk = disk
        self._clock = clock

    def create(self, state: State) -> None:
        """Write the first version. Raises StateError if a statefile exists."""
        self._check_namespace(state)
        make_private_directory(self.paths.root)
        with self._locked():
            if self._exists():
                raise StateError(
                    f"{self.paths.statefile} already exists",
                    "it is left from a crash; start the server again",
                )
            replace_file(self.paths.statefile, encode(state), self._disk)

    def read(self) -> State:
        """The current version. Raises NotRunningError if there is none, StateError if it cannot be
        understood."""
        path = self.paths.statefile
        try:
            with system_errors(f"cannot read {path}"):
                data = path.read_bytes()
        except StateError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise self._not_running() from error
            raise
        try:
            state = decode(data)
            self._check_namespace(state)
            return state
        except StateError as error:
            raise StateError(f"cannot read {path}: {error.cause}", error.remedy or _REPAIR) from error

    def update(self, change: Callable[[State], State]) -> State:
        """Replace the state by `change(state)` and return it. No other update happens in between.

        `change` is pure and quick: it runs under the lock. If it raises, nothing is written and the error
        passes through. Raises as `read` does, and LockTimeoutError (a StateError that names the holder).
        """
        if not self._exists():
            raise self._not_running()
        with self._locked():
            before = self.read()
            after = change(before)
            self._check_namespace(after)
            if after != before:
                replace_file(self.paths.statefile, encode(after), self._disk)
            return after

    def remove(self) -> None:
        """Remove the statefile, its lock and whatever an interrupted write left. Nothing to remove is no
        error."""
        if not self.paths.root.exists():
            return
        with self._locked(), system_errors(f"cannot remove {self.paths.statefile}"):
            self.paths.statefile.unlink(missing_ok=True)
            self.paths.statefile.with_name(f"{self.paths.statefile.name}.tmp").unlink(missing_ok=True)

    def set_aside(self) -> None:
        """Move a statefile that cannot be read out of the way, keeping it for whoever wants to look into
        it."""
        with self._locked(), system_errors(f"cannot move {self.paths.statefile}"):
            self.paths.statefile.replace(self.paths.unreadable_statefile)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.paths.update_lock, self._clock)
        lock.acquire(self._lock_timeout_s)
        try:
            yield
        finally:
            # lexists raises nothing: the lock is let go whatever happened to the directory.
            lock.release(remove=not os.path.lexists(self.paths.statefile))

    def _exists(self) -> bool:
        with system_errors(f"cannot read {self.paths.statefile}"):
            return self.paths.statefile.exists()

    def _check_namespace(self, state: State) -> None:
        if state.namespace != self.paths.namespace:
            raise StateError(f"the state is of namespace {state.namespace}, not {self.paths.namespace}")

    def _not_running(self) -> NotRunningError:
        namespace = self.paths.namespace
        return NotRunningError(
            f"no server runs in namespace {namespace}", "start one with `dynamo serve`, or name its namespace"
        )


_REPAIR = "stop the server, or start it again if none runs: it sets the file aside"
