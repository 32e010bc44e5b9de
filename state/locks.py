"""Locks between processes, by flock on a file that exists only as long as it is needed.

A lock belongs to an open file description, so the kernel frees it when the process dies. Descriptors are closed on
exec: programs that the process starts do not inherit a lock, but a forked child that never execs would.

The holder removes the lock file before it lets go. A process that waited then gets a lock on a file that is not at the
path any more, notices that, and starts over. So no two processes ever hold the lock of one path.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dynamo_local.core.errors import NamespaceBusyError, StateError
from state.files import FILE_MODE, make_private_directory, system_errors
from state.paths import StatePaths

_RETRY_S = 0.005
_SERVER_RETRY_FOR_S = 0.25
"""Time for which a server tries to take its lock. `server_pid` holds it for microseconds, which must not look like a
running server."""


@dataclass(frozen=True)
class Clock:
    """Time for a lock with a deadline."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class LockTimeoutError(StateError):
    """The lock was not free before the deadline. `holder`: the pid in the lock file, if there is one."""

    def __init__(self, path: Path, waited_s: float, holder: int | None) -> None:
        who = "another process" if holder is None else f"process {holder}"
        super().__init__(f"{path} is locked by {who} for more than {waited_s:g} s", "end it, then try again")
        self.holder = holder


class FileLock:
    """An exclusive lock on `path`. Not reentrant; use each object from one thread only."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self.path = path
        self._clock = clock or Clock()
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self, timeout_s: float) -> None:
        """Take the lock and write the pid into the file.

        Raises LockTimeoutError, or another StateError if the file cannot be locked at all.
        """
        if self.held:
            raise StateError(f"{self.path} is already locked by this object")
        deadline = self._clock.now() + timeout_s
        with system_errors(f"cannot lock {self.path}"):
            while (descriptor := _try_lock(self.path)) is None:
                if self._clock.now() >= deadline:
                    raise LockTimeoutError(self.path, timeout_s, read_pid(self.path))
                self._clock.sleep(_RETRY_S)
            self._descriptor = descriptor
            try:
                _sign(descriptor)
            except OSError:
                self.release(remove=False)
                raise

    @property
    def in_place(self) -> bool:
        """Whether the lock is held, and its file is still at its path."""
        return self._descriptor is not None and _is_at(self._descriptor, self.path)

    def release(self, remove: bool) -> None:
        """Let go of the lock, and remove the file before if told to. Does nothing when the lock is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            with system_errors(f"cannot remove {self.path}"):
                if remove and _is_at(descriptor, self.path):
                    self.path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock of that path. Raises StateError if that cannot be told."""
    lock = FileLock(path)
    try:
        lock.acquire(0.0)
    except LockTimeoutError:
        return True
    lock.release(remove=True)
    return False


class ServerLock:
    """The lock that a server holds for its whole life. Use it as a context manager, or by `acquire` and `release`."""

    def __init__(self, paths: StatePaths, clock: Clock | None = None) -> None:
        self.paths = paths
        self._lock = FileLock(paths.server_lock, clock)

    @property
    def held(self) -> bool:
        return self._lock.held

    def acquire(self) -> None:
        """Take the lock. Raises NamespaceBusyError, which names the process that holds it."""
        make_private_directory(self.paths.root)
        try:
            self._lock.acquire(_SERVER_RETRY_FOR_S)
        except LockTimeoutError as error:
            who = "an unknown pid" if error.holder is None else f"pid {error.holder}"
            namespace = self.paths.namespace
            raise NamespaceBusyError(
                f"a server already runs in namespace {namespace} ({who})",
                f"stop it with `dynamo stop --namespace {namespace}`, or choose another namespace",
            ) from error

    def renew(self) -> None:
        """Make the lock file again if it was removed. Raises NamespaceBusyError if another server was started since,
        which could not know of this one."""
        if not self._lock.in_place:
            self.release()
            self.acquire()

    def release(self) -> None:
        self._lock.release(remove=True)

    def __enter__(self) -> ServerLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def server_pid(paths: StatePaths) -> int | None:
    """The pid of the server that runs in the namespace; None if none runs, 0 if one has not written its pid yet."""
    with system_errors(f"cannot read {paths.server_lock}"):
        try:
            descriptor = os.open(paths.server_lock, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_pid(paths.server_lock) or 0
        finally:
            os.close(descriptor)
    return None


def read_pid(path: Path) -> int | None:
    """The pid in a lock file; None if there is none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def lock_abandoned(descriptor: int, path: Path) -> bool:
    """Lock a file that nobody has locked. False: somebody has, or the file is not at that path any more."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _is_at(descriptor, path)
    except BlockingIOError:
        return False


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock on the file that is at `path` now; None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        if lock_abandoned(descriptor, path):
            return descriptor
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.ENOLCK:
            raise OSError(error.errno, "its file system has no locks") from error
        raise
    os.close(descriptor)
    return None


def _sign(descriptor: int) -> None:
    """Write this process's pid into the file."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
