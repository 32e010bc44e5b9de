"""What a crashed server has left: `leftovers` finds its processes, `clear_leftovers` clears all of it."""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_local.core.errors import ConfigError, NotRunningError, StateError
from dynamo_local.core.names import NAMESPACE_ENV, WATCHER_ENV, parse_watcher
from state.locks import ServerLock
from state.machine.processes import Process, Processes, ProcFs
from state.paths import StatePaths, state_root
from state.remains import remove_remains
from state.statefile.store import StateStore

TERM_S = 5.0
"""Between SIGTERM and SIGKILL, for a process whose server is dead: its answers reach nobody any more."""

KILL_S = 5.0
"""For a killed process to be gone. Freeing much memory takes seconds."""

ROUNDS = 5


def leftovers(paths: StatePaths, processes: Iterable[Process]) -> tuple[Process, ...]:
    """The processes that a server of this namespace and state root has started, by their environment.

    The environment of such a process names the namespace, one of its watchers, and the state root. Processes of another
    server differ in one of them; other processes have none.
    """
    return tuple(process for process in processes if _belongs(paths, process))


def clear_leftovers(lock: ServerLock, processes: Processes | None = None) -> tuple[str, ...]:
    """End the processes that a crashed server of the namespace has left, and remove its files. Returns a note for
    each; none after a clean end.

    The caller holds the server lock, so nothing of it belongs to a living server. Raises StateError if a process cannot
    be ended (its devices are in use then), or if the statefile is that of another node. Nothing is removed then.
    """
    if not lock.held:
        raise StateError("leftovers are only cleared under the server lock")
    store = StateStore(lock.paths)
    store.check_own()
    notes = _end_processes(lock.paths, processes or ProcFs())
    return (*notes, *_remove_files(store))


def _belongs(paths: StatePaths, process: Process) -> bool:
    try:
        watcher = parse_watcher(process.environ.get(WATCHER_ENV, ""))
    except ConfigError:
        return False
    namespaces = {watcher.namespace, process.environ.get(NAMESPACE_ENV)}
    return namespaces == {paths.namespace} and state_root(process.environ) == paths.root


def _end_processes(paths: StatePaths, processes: Processes) -> list[str]:
    """End leftover processes. Lists them again after each round, as they may have started others meanwhile."""
    notes: list[str] = []
    found = leftovers(paths, processes.snapshot())
    for _ in range(ROUNDS):
        if not found:
            return notes
        if processes.end(found, TERM_S, KILL_S):
            break
        notes += [f"ended {_described(process)}, left by a crashed server" for process in found]
        found = leftovers(paths, processes.snapshot())
    if not found:
        return notes
    pids = ", ".join(str(process.pid) for process in found)
    raise StateError(
        f"processes of a crashed server cannot be ended: {pids}",
        "they may hang in a driver or be started again; end them, then start the server",
    )


def _remove_files(store: StateStore) -> list[str]:
    """Remove files, the run directory before the statefile: after a crash in between, the next start clears the
    rest."""
    paths = store.paths
    notes: list[str] = []
    try:
        store.read_file()
        notes.append(f"removed the statefile of a crashed server: {paths.statefile}")
    except NotRunningError:
        pass
    except StateError as error:
        store.set_aside()
        notes.append(f"set an unreadable statefile aside: {paths.unreadable_statefile} ({error.cause})")
    segments, directory = remove_remains(paths)
    if segments:
        notes.append(f"removed {segments} files of shared memory of a crashed server")
    if directory:
        notes.append(f"removed the run directory of a crashed server: {paths.run_dir}")
    store.remove()
    return notes


def _described(process: Process) -> str:
    return f"process {process.pid} ({process.environ.get(WATCHER_ENV)})"
