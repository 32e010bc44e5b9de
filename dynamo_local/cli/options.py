"""Options that several commands share, and types of their values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dynamo_local.cli import completion
from dynamo_local.core.names import DEFAULT_NAMESPACE, NAMESPACE_ENV

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_local.control.client import ControlClient
    from state.paths import StatePaths

_F = TypeVar("_F", bound=Callable[..., Any])

ONLY_SERVER = ""
"""Value of --namespace where it is not given: the command finds its server by itself."""


def together(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Return a decorator that adds these options, which are shown in this order."""
    return lambda function: reduce(lambda decorated, option: option(decorated), reversed(options), function)


namespace_option = click.option(
    "--namespace",
    envvar=NAMESPACE_ENV,
    show_envvar=True,
    default=ONLY_SERVER,
    show_default="the only server that runs",
    metavar="NAME",
    shell_complete=completion.namespaces,
    help="Namespace of the server, which `dynamo ls` shows.",
)
"""The option --namespace, which selects a running server. Without it the only one that runs is meant."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")

since_option = click.option("--since", metavar="TIME", help="Show what is newer than TIME, e.g. 90s, 10m or 1h.")
"""The option --since, which `cutoff_of` reads."""


def endpoint_option(purpose: str) -> Callable[[_F], _F]:
    """Return a decorator that adds the option --endpoint, which selects an endpoint of the server."""
    return click.option("--endpoint", metavar="NAME", shell_complete=completion.endpoints, help=purpose)


def paths_of(namespace: str) -> StatePaths:
    """Return the paths of the files of the namespace's server; without a namespace, of the only server that runs.

    Raises ConfigError for an invalid namespace, and as `choose_server`.
    """
    from dynamo_local.core.server_choice import choose_server

    return _paths(namespace, choose_server)


def server_of(namespace: str) -> ControlClient:
    """Return what asks the namespace's server. Raises as `paths_of`."""
    from dynamo_local.control.client import ControlClient

    return ControlClient(paths_of(namespace))


def paths_to_stop(namespace: str) -> StatePaths:
    """As `paths_of`; if no server runs, the only one that has crashed is meant, or else the default namespace."""
    from dynamo_local.core.server_choice import choose_server_to_stop

    def choose(running: Sequence[str], crashed: Sequence[str]) -> str:
        # Processes of a crashed server may be left even if its files are not.
        return choose_server_to_stop(running, crashed) if running or crashed else DEFAULT_NAMESPACE

    return _paths(namespace, choose)


def paths_of_logs(namespace: str) -> StatePaths:
    """As `paths_of`; if no server runs, the only one that has crashed is meant, or else the only one that has logs."""
    from dynamo_local.core.errors import NotRunningError
    from dynamo_local.core.server_choice import START_REMEDY
    from state.namespaces import with_logs

    def choose(crashed: Sequence[str]) -> str:
        if len(crashed) == 1:
            return crashed[0]
        found = _only(with_logs(state_folder()), "{number} have left logs")
        if found is None:
            raise NotRunningError("no server runs, and none has left logs", START_REMEDY)
        return found

    return _paths_without_server(namespace, choose)


def paths_of_kept(namespace: str, what: str) -> StatePaths:
    """As `paths_of`; if no server runs, the only namespace that keeps such things is meant: "endpoints", "keys",
    "usage", "batches" or "tasks". Keys are made before the server that wants them: if there are none, the default
    namespace is meant."""
    from dynamo_local.core.server_choice import choose_server
    from state.namespaces import with_keys, with_registry, with_store, with_usage

    find, several = {
        "endpoints": (with_registry, "endpoints are ordered in {number} namespaces"),
        "keys": (with_keys, "there are keys in {number} namespaces"),
        "usage": (with_usage, "{number} have left usage"),
    }.get(what) or (partial(with_store, what=what), f"{{number}} have {what}")

    def choose(crashed: Sequence[str]) -> str:
        found = _only(find(state_folder()), several)
        return found or (DEFAULT_NAMESPACE if what == "keys" else choose_server((), crashed))

    return _paths_without_server(namespace, choose)


def _only(found: Sequence[str], what: str) -> str | None:
    """Return the only namespace found, None if there is none. Raises UsageError for several; `what` says of what."""
    from dynamo_local.core.errors import UsageError

    if len(found) > 1:
        raise UsageError(
            f"no server runs, and {what.format(number=len(found))}: {', '.join(found)}",
            f"name one by --namespace or {NAMESPACE_ENV}",
        )
    return found[0] if found else None


def _paths_without_server(namespace: str, choose: Callable[[Sequence[str]], str]) -> StatePaths:
    """As `paths_of`; if no server runs, `choose` chooses by the servers that have crashed."""
    from dynamo_local.core.server_choice import choose_server

    return _paths(
        namespace,
        lambda running, crashed: choose_server(running, crashed) if running else choose(crashed),
    )


def _paths(namespace: str, choose: Callable[[Sequence[str], Sequence[str]], str]) -> StatePaths:
    from state.namespaces import find_servers
    from state.paths import StatePaths

    root = state_folder()
    if namespace == ONLY_SERVER:
        found = find_servers(root)
        namespace = choose(found.running, found.crashed)
    return StatePaths(root, namespace)


def state_folder() -> Path:
    """Return the folder of all servers' files."""
    import os

    from state.paths import state_root

    return state_root(os.environ)


def cutoff_of(since: str | None, clock: Callable[[], float] = time.time) -> float | None:
    """Return the Unix time before which nothing is to be shown, in seconds; None without --since. Raises UsageError."""
    from dynamo_local.load.quantities import parse_duration

    return None if since is None else clock() - parse_duration(since)


class FiniteRange(click.FloatRange):
    """A range of decimal numbers without nan and inf. No comparison refuses nan, and JSON has neither of the two."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click's type does."""
        number = super().convert(value, param, ctx)  # type: ignore[arg-type]  # typed more narrowly than click calls it
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        return float(number)
