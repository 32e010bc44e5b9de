"""The server that is asked: one that runs and serves the model, or one of its own for the time of one command."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from dynamo_local.core.errors import NotRunningError, SupervisorError, UsageError
from dynamo_local.load.client import Endpoint, ask, find_model, parse_url
from dynamo_local.load.connection import ExchangeError
from dynamo_local.process.ancestry import PARENT_PID_ENV
from state.locks import server_pid
from state.namespaces import find_servers
from state.paths import StatePaths
from state.record import read_record

# Finds the running server that serves a model.


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


# A server that runs for the time of one command: `dynamo serve` in a child process.

_READY = "API ready at "
_ERROR = "error: "
_ENDED_WITHIN_S = 60.0
_LAST_LINES = 20


@contextmanager
def serving(model: str, root: Path, note: Callable[[str], None]) -> Iterator[str]:
    """Serve a model on a free port, and yield the address of the API.

    `note` gets the lines of progress. The server ends with the context, and also if this process is killed. Raises
    UsageError or SupervisorError with the server's own reason.
    """
    with _Child(["serve", model, "--port", "0", "--namespace", free_namespace(root)], note) as child:
        yield child.await_ready()


def free_namespace(root: Path) -> str:
    """The first of the namespaces run-1, run-2, ... in which no server runs. The names are used again, so that a server
    clears what a killed one of that name has left."""
    names = (f"run-{number}" for number in count(1))
    return next(name for name in names if server_pid(StatePaths(root, name)) is None)


class _Child:
    """`dynamo serve` with these arguments. The kernel sends it SIGTERM when this process dies, and then it ends all its
    processes and removes its files."""

    def __init__(self, arguments: Sequence[str], note: Callable[[str], None]) -> None:
        self._note = note
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last: list[str] = []
        # A session of its own: Ctrl-C on the terminal is for this process, which ends the child in order.
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "dynamo_local.process.guarded", "--term", "--"),
                *(sys.executable, "-m", "dynamo_local.cli.main", *arguments),
            ],
            env={**os.environ, PARENT_PID_ENV: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        # Reads to the end: a server whose output nobody reads would stop when the pipe is full.
        self._reading = threading.Thread(target=self._read, name="server output", daemon=True)

    def __enter__(self) -> Self:
        self._reading.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_ENDED_WITHIN_S)
        except KeyboardInterrupt:
            # The user does not want to wait. A second signal hurries the server.
            self._process.terminate()
            self._process.wait(_ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def await_ready(self) -> str:
        """Wait for the address of the API. Raises UsageError or SupervisorError if the server ends before."""
        while (line := self._lines.get()) is not None:
            _, ready, after = line.partition(_READY)
            if ready:
                return after.split()[0]
            self._last = [*self._last, line][-_LAST_LINES:]
            if not line.startswith(_ERROR):
                self._note(line)
        code = self._process.wait()
        reasons = [line.removeprefix(_ERROR) for line in self._last if line.startswith(_ERROR)]
        raised = UsageError if code == UsageError.exit_code else SupervisorError
        raise raised(reasons[-1] if reasons else f"the server ended with exit code {code}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)
