"""The folder of models that are made or fetched once. A model in it is whole as soon as its folder exists."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dynamo_local.core.errors import UsageError
from state.files import make_private_directory

CACHE_DIR_ENV = "DYN_LOCAL_CACHE_DIR"
"""Folder of models that are made or fetched once. By default ~/.cache/dynamo-local."""

CACHE_REMEDY = f"set {CACHE_DIR_ENV} to a folder with space that you can write"

FreeBytes = Callable[[Path], int]
"""Gives the bytes that this user can still write to the file system of a folder that exists."""

_MB = 1_000_000


def default_cache_root() -> Path:
    """Folder for what is made or fetched once: $DYN_LOCAL_CACHE_DIR, else ~/.cache/dynamo-local.

    For a user without a home it is `temporary_cache_root`.
    """
    named = os.environ.get(CACHE_DIR_ENV)
    if named:
        return Path(named).expanduser().absolute()
    try:
        return Path.home() / ".cache" / "dynamo-local"
    except RuntimeError:
        return temporary_cache_root()


def temporary_cache_root() -> Path:
    """A private folder of this user among the temporary files, made if need be, for what is small, where the home
    cannot be written. Raises StateError if another user has put a folder there."""
    return make_private_directory(Path(tempfile.gettempdir()) / f"dynamo-local-cache-{os.geteuid()}")


def make_models_folder(root: Path) -> Path:
    """Make the folder `models` of a cache, for this user only. Raises OSError."""
    folder = root / "models"
    for each in (root, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def free_bytes(folder: Path) -> int:
    """The bytes that this user can still write to the folder's file system. Raises OSError."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def check_room(folder: Path, needed_bytes: int, what: str, free: FreeBytes = free_bytes) -> None:
    """Raise UsageError with both figures if fewer bytes than needed are free where the folder is."""
    available = free(folder)
    if available < needed_bytes:
        raise UsageError(
            f"{what} needs {needed_bytes // _MB} MB in {folder}, {available // _MB} MB are free",
            f"make room, or {CACHE_REMEDY}",
        )


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside the final place, and rename it to `folder` when the block ends without an error.

    `folder` is whole as soon as it exists, also after a crash or a power cut. Safe with concurrent callers that write
    the same content.
    """
    draft = Path(tempfile.mkdtemp(prefix=_draft_prefix(folder), dir=folder.parent))
    try:
        yield draft
        for path in draft.iterdir():
            _sync(path)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
        _sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def scratch_for(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside the final place of a model, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix=_draft_prefix(folder), dir=folder.parent) as scratch:
        yield Path(scratch)


@contextmanager
def one_maker(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time make a model; `on_wait` is called before this process waits for another one.

    What makers that were killed left behind is removed. The kernel ends a dead process's turn.
    """
    lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.parent.glob(f"{_draft_prefix(folder)}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(lock)


def _draft_prefix(folder: Path) -> str:
    return f".making-{folder.name}-"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Some network file systems cannot; a crash of the process alone loses nothing there either.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
