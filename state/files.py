"""Private files and directories: atomic replacement, safe creation, complete removal.

Errors of the file system leave here as StateError with the path and the system's reason.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dynamo_local.core.errors import StateError
from state.paths import Sockets, StatePaths

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


class Disk:
    """The steps of an atomic replacement, a method each, so that a test can crash between any two."""

    def create(self, path: Path) -> int:
        """Open a new file for writing; fails if one exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)

    def write(self, descriptor: int, data: bytes) -> int:
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sync_directory(self, directory: Path) -> None:
        """Make a rename in the directory survive a power cut."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


DISK = Disk()


def replace_file(path: Path, data: bytes, disk: Disk = DISK, *, durable: bool = True) -> None:
    """Replace the file's contents atomically, mode 0600. A reader, also after a crash at any point, sees the old
    contents or the new ones; after a power cut only if `durable`, which takes longer.

    There may be one writer at a time: the temporary file has a fixed name, so that a crash leaves at most one, which
    the next write removes. Raises DiskError.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with system_errors(f"cannot write {path}"):
        temporary.unlink(missing_ok=True)
        try:
            _write_new(temporary, data, disk, durable)
            disk.rename(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            disk.sync_directory(path.parent)


def make_private_directory(path: Path) -> Path:
    """Create the directory, mode 0700, and its parents. One that exists is checked, and closed to others.

    Raises StateError if it belongs to another user, or if others can write to it: they could then replace the files in
    it.
    """
    with system_errors(f"cannot create {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=DIRECTORY_MODE)
        except FileExistsError:
            _check_private(path)
    return path


def make_run_directory(paths: StatePaths) -> None:
    """Create state root, run directory and log directory. Raises StateError if the run directory is not empty: what a
    crash has left must be cleared first."""
    for directory in (paths.root, paths.run_dir, paths.logs_dir):
        make_private_directory(directory)
    with system_errors(f"cannot list {paths.run_dir}"):
        if any(paths.run_dir.iterdir()):
            raise StateError(f"{paths.run_dir} is not empty", "it is left from a crash; delete it")


def make_sockets(paths: StatePaths, temporary: Path | None = None) -> Sockets:
    """Choose the directory of the sockets: the run directory, or, if paths in it are too long for sockets, a new
    private directory under `temporary` (the system's directory for temporary files by default).

    `remove_run_directory` removes the latter as well. Raises StateError.
    """
    sockets = Sockets(paths.run_dir)
    if sockets.fit:
        return sockets
    # Here, since commands that only look import this module.
    import tempfile

    name = f"{_socket_prefix(paths)}{os.urandom(4).hex()}"
    sockets = Sockets((temporary or Path(tempfile.gettempdir())) / name)
    if not sockets.fit:
        raise StateError(
            f"paths under {sockets.directory.parent} are too long for a unix socket",
            "set DYN_LOCAL_STATE_DIR to a shorter path",
        )
    with system_errors("cannot create a directory for sockets"):
        # The link before the directory: after a crash in between, nothing exists that is not recorded.
        paths.sockets_link.symlink_to(sockets.directory)
        sockets.directory.mkdir(mode=DIRECTORY_MODE)
    return sockets


def sockets_of(paths: StatePaths) -> Sockets:
    """The sockets of a server, wherever `make_sockets` has put them. Raises DiskError."""
    with system_errors(f"cannot read {paths.sockets_link}"):
        elsewhere = _sockets_elsewhere(paths)
        return Sockets(paths.run_dir if elsewhere is None else elsewhere)


def remove_run_directory(paths: StatePaths) -> bool:
    """Remove the run directory with everything in it, and the directory of the sockets. Returns whether there was a run
    directory. Raises DiskError."""
    with system_errors(f"cannot remove {paths.run_dir}"):
        if not os.path.lexists(paths.run_dir):
            return False
        _remove_sockets(paths)
        remove_tree(paths.run_dir)
        return True


def _remove_sockets(paths: StatePaths) -> None:
    directory = _sockets_elsewhere(paths)
    if directory is not None:
        remove_tree(directory)


def _sockets_elsewhere(paths: StatePaths) -> Path | None:
    """The directory of the sockets that the run directory's link names; None if `make_sockets` cannot have made it."""
    if paths.run_dir.is_symlink() or not paths.sockets_link.is_symlink():
        return None
    directory = paths.sockets_link.readlink()
    if not directory.name.startswith(_socket_prefix(paths)) or not os.path.lexists(directory):
        return None
    found = directory.lstat()
    return directory if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() else None


def room(path: Path) -> tuple[int, int] | None:
    """Bytes free for this user, and size, of the file system that holds the path; None if that is not known."""
    try:
        space = os.statvfs(path)
    except OSError:
        return None
    # A file system without blocks of its own, as of some networks, tells no size.
    return (space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize) if space.f_blocks else None


def free_bytes(folder: Path) -> int | None:
    """The bytes that this user can still write to the folder's file system; None if that is not known."""
    found = room(folder)
    return None if found is None else found[0]


def nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    # Not `Path.exists`, which raises where a folder above may not be entered.
    return next((each for each in (path, *path.parents) if os.path.lexists(each)), path)


class DiskError(StateError):
    """The system cannot read or write a file or directory."""


@contextmanager
def system_errors(cause: str) -> Iterator[None]:
    """Turn OSError into DiskError: `cause`, then the system's reason."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DiskError(f"{cause}: {reason}", "check permissions and free space") from error


def _write_new(path: Path, data: bytes, disk: Disk, durable: bool) -> None:
    descriptor = disk.create(path)
    try:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[disk.write(descriptor, bytes(remaining)) :]
        if durable:
            disk.sync(descriptor)
    finally:
        os.close(descriptor)


def _check_private(path: Path) -> None:
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise StateError(f"{path} is not a directory", "remove it, or set DYN_LOCAL_STATE_DIR")
    if found.st_uid != os.geteuid():
        raise StateError(f"{path} belongs to another user", "set DYN_LOCAL_STATE_DIR to a directory of your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StateError(f"others can write to {path}", f"run: chmod go-w {path}")
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        # Closed to readers as well: names of files, such as namespaces, are private.
        path.chmod(DIRECTORY_MODE)


def remove_tree(directory: Path) -> None:
    """Remove a directory with everything in it. A link in its place is not followed."""
    if directory.is_symlink():
        directory.unlink()
        return
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        # A dying process has removed one of its files meanwhile. Remove the rest.
        shutil.rmtree(directory, ignore_errors=True)


def _socket_prefix(paths: StatePaths) -> str:
    return f"dynamo-{paths.namespace}-"


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600. Not atomic: for files that have no reader yet. Raises DiskError."""
    with (
        system_errors(f"cannot write {path}"),
        os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
    ):
        file.write(data)


def open_log(path: Path) -> BinaryIO:
    """Open a log of mode 0600 to append to."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")
