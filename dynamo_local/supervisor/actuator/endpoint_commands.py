"""Endpoints in commands about workers: names of them and of their workers, whose number the server keeps."""

from __future__ import annotations

import re

from dynamo_local.core.errors import UsageError
from dynamo_local.core.names import endpoint_of, parse_revision
from dynamo_local.core.planning.actions import Action, Restart
from dynamo_local.supervisor.server.launch.blueprint import is_worker
from state.statefile.model import Component, State

_OF_WORKER = re.compile(r"(?:[A-Za-z0-9-]+_)?(?P<endpoint>[a-z0-9-]+)@[0-9]+_.*")
_NAME = re.compile(r"[a-z0-9-]+")


def endpoint_named(name: str) -> str:
    """The endpoint that a name in a command stands for, or whose worker it names; empty for a service of the graph and
    its processes. Names of services have a capital, those of endpoints have none."""
    of_worker = _OF_WORKER.fullmatch(name)
    if of_worker is not None:
        return of_worker["endpoint"]
    return name if _NAME.fullmatch(name) else ""


def plan_restart_of_all(state: State, endpoint: str, *, even_the_last: bool) -> tuple[Action, ...]:
    """Plan the restart of all workers of an endpoint, except those that end anyway; nothing if it has none. Those of
    the first revision come first. Pure."""
    of_endpoints = [c for c in state.components.values() if c.watcher.revision and c.holds and is_worker(c)]
    mine = [c for c in of_endpoints if endpoint_of(c.watcher.revision) == endpoint and c.phase != "retiring"]
    mine.sort(key=lambda component: (parse_revision(component.watcher.revision), component.watcher))
    return tuple(Restart(c.watcher_name, c.role, even_the_last) for c in mine)


def check_not_of_endpoint(worker: Component) -> None:
    """Raise UsageError for a worker in whose place the server would start another one."""
    endpoint = endpoint_of(worker.watcher.revision)
    if endpoint:
        raise UsageError(
            f"{worker.watcher_name} is a worker of endpoint {endpoint}, whose number of workers the server keeps",
            f"`dynamo scale {endpoint}=NUMBER` sets that number, and `dynamo restart` replaces the worker",
        )
