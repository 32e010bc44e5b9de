"""Why a server, or one of its files, is not there."""

from __future__ import annotations

from dynamo_local import __version__
from dynamo_local.control.errors import only_starting
from dynamo_local.core.errors import NotRunningError, UnansweredError
from dynamo_local.core.server_choice import START_REMEDY
from state.namespaces import Found
from state.paths import StatePaths
from state.record import read_record


def absent_server(namespace: str, found: Found) -> NotRunningError:
    """The error for a namespace in which no server runs. `found`: the servers of the same state root. Pure."""
    cause = f"no server runs in namespace {namespace}"
    if namespace in found.crashed:
        return NotRunningError(
            f"{cause} (one that crashed left files)", f"`dynamo stop --namespace {namespace}` removes them"
        )
    running = f"servers run in: {', '.join(found.running)}"
    return NotRunningError(cause, running if found.running else START_REMEDY)


def why_absent(paths: StatePaths) -> UnansweredError:
    """The error for a file that is missing from the run directory of a server that runs."""
    namespace = paths.namespace
    record = read_record(paths)
    if record is None and not paths.statefile.exists():
        return only_starting(namespace)
    if record is not None and record.release != __version__:
        release = f"release {record.release}" if record.release else "an earlier release"
        return UnansweredError(
            f"the server in namespace {namespace} is of {release}, this command of {__version__}",
            "use the `dynamo` that started it, or end it: `dynamo stop`",
        )
    if not paths.run_dir.exists():
        return _removed(paths.run_dir)
    if record is None or record.phase == "running" or paths.blueprint_file.exists():
        return _removed(f"a file in {paths.run_dir}")
    if record.phase == "stopping":
        return UnansweredError(
            f"the server in namespace {namespace} is stopping", "`dynamo ls` shows whether it has ended"
        )
    return only_starting(namespace)


def _removed(what: object) -> UnansweredError:
    return UnansweredError(f"{what} was removed: the server goes on, and makes it again", "try again in a moment")
