"""Finds the running server that serves a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo_local.core.errors import NotRunningError, UsageError
from dynamo_local.load.client import Endpoint, ask, find_model, parse_url
from dynamo_local.load.connection import ExchangeError
from state.namespaces import find_servers
from state.paths import StatePaths
from state.record import read_record


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: tuple[_Model, ...]


@dataclass(frozen=True)
class Served:
    """A running server with an API, and the names of its models, as the API lists them."""

    namespace: str
    url: str
    models: tuple[str, ...]


async def running_servers(
    root: Path, namespace: str | None, key: str | None, note: Callable[[str], None]
) -> list[Served]:
    """Ask all servers of the state folder, or that of the namespace, for their models. A server that does not answer
    is left out with a note. Raises ConfigError for an invalid namespace, and DiskError."""
    asked = await asyncio.gather(*(_ask(name, url, key, note) for name, url in running_apis(root, namespace)))
    return [served for served in asked if served is not None]


def running_apis(root: Path, namespace: str | None = None) -> list[tuple[str, str]]:
    """Namespace and URL of each running server that has an API. Raises as `running_servers`."""
    names = find_servers(root).running if namespace is None else (namespace,)
    found = ((name, read_record(StatePaths(root, name))) for name in names)
    return [
        (name, record.url)
        for name, record in found
        if record is not None and record.phase == "running" and record.url is not None
    ]


async def _ask(namespace: str, url: str, key: str | None, note: Callable[[str], None]) -> Served | None:
    endpoint = parse_url(url, key)
    connections = endpoint.connections()
    try:
        answer = await ask(connections, endpoint.request("GET", "/v1/models"))
        models = msgspec.json.decode(answer, type=_Models).data
    except (ExchangeError, msgspec.DecodeError) as error:
        note(f"the server of namespace {namespace} does not list its models: {error}")
        return None
    finally:
        connections.close()
    return Served(namespace, url, tuple(model.id for model in models))


def choose(servers: Sequence[Served], model: str | None) -> tuple[str, str] | None:
    """Choose the server that serves the model. Returns its URL and the model's name there; None if none does.

    Without a model the only server is chosen, and its first model. Raises NotRunningError if there is none then, and
    UsageError if there are several.
    """
    if model is not None:
        # A folder may be served under its absolute path.
        wanted = {model, str(Path(model).absolute())}
        found = ((server.url, name) for server in servers for name in server.models if name in wanted)
        return next(found, None)
    servers = [server for server in servers if server.models]
    if not servers:
        raise NotRunningError("no server runs", "name a model: `dynamo chat MODEL` starts a server for it")
    if len(servers) > 1:
        names = ", ".join(f"{server.models[0]} (namespace {server.namespace})" for server in servers)
        raise UsageError(f"{len(servers)} servers run: {names}", "name the model")
    return servers[0].url, servers[0].models[0]


async def first_model(endpoint: Endpoint, wanted: str | None) -> str:
    """The name of the model to ask: the wanted one, or the first that the API lists. Raises LoadError."""
    connections = endpoint.connections()
    try:
        model, _ = await find_model(connections, endpoint, wanted)
        return model
    finally:
        connections.close()
