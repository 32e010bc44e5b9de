"""Chooses the server that a command means, where its namespace is not given. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.core.errors import NotRunningError, UsageError
from dynamo_local.core.names import NAMESPACE_ENV

START_REMEDY = "start one: dynamo serve MODEL"


def choose_server(running: Sequence[str], crashed: Sequence[str]) -> str:
    """Return the namespace of the only server that runs.

    `crashed`: namespaces whose server was killed and has left files. Raises NotRunningError if no server runs,
    UsageError with the namespaces to choose from if several do.
    """
    if len(running) == 1:
        return running[0]
    if running:
        raise UsageError(
            f"{len(running)} servers run: {', '.join(sorted(running))}", f"name one by --namespace or {NAMESPACE_ENV}"
        )
    if crashed:
        raise NotRunningError(f"no server runs ({describe_crashed(crashed)})", START_REMEDY)
    raise NotRunningError("no server runs", START_REMEDY)


def choose_server_to_stop(running: Sequence[str], crashed: Sequence[str]) -> str:
    """Return the namespace of the only server that runs; if none runs, of the only one that has crashed.

    Raises as `choose_server`.
    """
    if not running and len(crashed) == 1:
        return crashed[0]
    return choose_server(running, crashed)


def describe_crashed(crashed: Sequence[str]) -> str:
    """Say which servers have crashed, and the command that removes what they have left."""
    names = sorted(crashed)
    commands = ", ".join(f"`dynamo stop --namespace {name}`" for name in names)
    if len(names) == 1:
        return f"one that crashed left files in namespace {names[0]}, which {commands} removes"
    return f"{len(names)} that crashed left files, which {commands} remove"
