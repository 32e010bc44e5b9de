"""`dynamo doctor --fix`: repairs that do no harm. No process is ended, and no file of another user is touched."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dynamo_local.core.errors import NamespaceBusyError
from dynamo_local.doctor.endpoints import open_files
from dynamo_local.doctor.namespaces import namespaces
from dynamo_local.doctor.servers import owner_lives, servers
from dynamo_local.doctor.storage import state_folders
from state.files import DIRECTORY_MODE, FILE_MODE, system_errors
from state.locks import ServerLock
from state.machine.processes import ProcFs
from state.paths import StatePaths
from state.statefile.leftovers import clear_leftovers, leftovers


def repair(root: Path) -> list[str]:
    """Close our folders and registries to other users, and remove what dead servers have left. Returns a line for each
    thing done. Raises StateError."""
    done = [*close_folders(root), *close_registries(root)]
    for server in servers(root):
        if server.is_clearable:
            done += _clear(StatePaths(root, server.namespace))
    return done


def close_folders(root: Path) -> list[str]:
    """Give our folders that others can open the mode 0700. The cache is left alone: its files are no secret."""
    done: list[str] = []
    for folder in state_folders(root):
        if folder.is_open:
            with system_errors(f"cannot close {folder.path} to others"):
                Path(folder.path).chmod(DIRECTORY_MODE)
            done.append(f"closed {folder.path} to other users")
    return done


def close_registries(root: Path) -> list[str]:
    """Give files of registries that others can open the mode 0600."""
    found = [path for paths in namespaces(root) for path in open_files(paths)]
    for path in found:
        with system_errors(f"cannot close {path} to others"):
            path.chmod(FILE_MODE)
    return [f"closed {path} to other users" for path in found]


def _clear(paths: StatePaths) -> list[str]:
    # A server may have been started since the look: the lock tells, and keeps others from starting meanwhile.
    with suppress(NamespaceBusyError), ServerLock(paths) as lock:
        if not owner_lives(paths) and not leftovers(paths, ProcFs().snapshot()):
            notes = list(clear_leftovers(lock))
            return notes or [f"removed the lock of a crashed server: {paths.server_lock}"]
    return []
