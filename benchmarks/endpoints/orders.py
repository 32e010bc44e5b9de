"""Random creates, updates, scalings, deletes and kills: in the end the registry equals what was ordered, and no process
and no device is left of what was deleted.

The workers are mockers. Orders come as fast as they are answered, so that most meet an endpoint that starts, changes or
ends. Some are broken off by a kill of `dynamo serve`: such an order either holds whole, or not at all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Figures, progress, save, table
from benchmarks.harness.servers import NAMESPACE, Server, ServerError, running, serve_again, start_endpoints
from dynamo_local.control.client import ControlClient
from dynamo_local.control.errors import status_of
from dynamo_local.control.operations import (
    CREATE_ENDPOINT,
    DELETE_ENDPOINT,
    LIST_ENDPOINTS,
    SCALE_ENDPOINT,
    UPDATE_ENDPOINT,
    Operation,
)
from dynamo_local.core.endpoints.checks import changed_spec, read_spec
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import DynamoError, UsageError
from dynamo_local.core.messages.endpoints import view_of
from state.endpoints.registry import read_registry
from state.machine.processes import ProcFs
from state.paths import StatePaths
from state.statefile.leftovers import leftovers
from state.statefile.model import State
from state.statefile.store import StateStore

SUMMARY = "1,000 random orders about endpoints, and kills: is there what was ordered, and nothing else?"

_NAMES = ("ant", "bee", "cat", "dog", "eel")
_SLOTS = 8
_ANSWER_S = 30.0
_SETTLED_WITHIN_S = 300.0
_POLL_S = 0.2
_KILL_SERVER_EVERY = 125


@dataclass
class Orders:
    """The orders of one run, and what is to come of them. `counts`: by kind, with refusals apart."""

    server: Server
    scratch: Path
    random: random.Random
    expected: dict[str, EndpointSpec] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def paths(self) -> StatePaths:
        return _paths_of(self.server)

    async def give(self, number: int) -> None:
        """Give one order, or kill something."""
        if number % _KILL_SERVER_EVERY == _KILL_SERVER_EVERY - 1:
            await self._kill_server_under_an_order()
            return
        kind = self.random.choices(("create", "update", "scale", "delete", "kill"), (30, 25, 15, 20, 10))[0]
        if kind == "kill":
            self._kill_worker()
            return
        order, after = self._order(kind)
        try:
            await self.ask(*order)
        except UsageError as error:
            self.counts[f"{kind}, refused {status_of(error)}"] += 1
        else:
            self.expected = after
            self.counts[kind] += 1

    def _order(self, kind: str) -> tuple[tuple[Operation, str, Any], dict[str, EndpointSpec]]:
        """An order, and the endpoints that there are to be if it is taken."""
        name = self.random.choice(_NAMES)
        known = self.expected.get(name)
        if kind == "create":
            fields = {"name": name, "model": "random", "engine": "mocker", "max_workers": self.random.randint(1, 2)}
            return (CREATE_ENDPOINT, name, fields), {**self.expected, name: read_spec(fields)}
        if kind == "update":
            changes: dict[str, Any] = {"args": {"seed": self.random.randrange(10**6)}}
            if self.random.random() < 0.3:
                changes = {"max_workers": self.random.randint(1, 2)}
            after = {} if known is None else {name: changed_spec(known, changes)}
            return (UPDATE_ENDPOINT, name, changes), {**self.expected, **after}
        if kind == "scale":
            return (SCALE_ENDPOINT, name, {"workers": self.random.randint(1, 2)}), self.expected
        return (DELETE_ENDPOINT, name, None), {other: spec for other, spec in self.expected.items() if other != name}

    async def ask(self, operation: Operation, name: str = "", fields: Any = None) -> Any:
        ask = ControlClient(self.paths).do
        return await asyncio.to_thread(ask, operation, fields, timeout_s=_ANSWER_S, name=name)

    def _kill_worker(self) -> None:
        workers = [c.pid for c in self._state().components.values() if c.watcher.revision and c.pid is not None]
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.random.choice(workers), signal.SIGKILL)
            self.counts["worker killed"] += 1

    async def _kill_server_under_an_order(self) -> None:
        """Kill `dynamo serve` at any moment of an order, and start the next one in its place."""
        order, after = self._order(self.random.choice(("create", "update", "delete")))
        asking = asyncio.create_task(self.ask(*order))
        await asyncio.sleep(self.random.random() * 0.02)
        # Not its child processes: these notice it by themselves.
        self.server.popen.kill()
        await asyncio.to_thread(self.server.popen.wait)
        with contextlib.suppress(DynamoError):
            await asking
            self.expected = after
        found = self._registered()
        if found not in (self.expected, after):
            raise ServerError(f"an order that was broken off is half done: {found}")
        self.expected = found
        # An empty list: without one, `dynamo serve` wants something to serve where nothing is ordered.
        file = str(self.server.log.with_name("endpoints.yaml"))
        await serve_again(self.server, ("-f", file, f"--cpu-slots={_SLOTS}"))
        await self.reachable()
        self.counts["server killed"] += 1
        progress(f"server killed and started again, with {', '.join(found) or 'no endpoint'}")

    async def reachable(self) -> None:
        """Wait until the server takes orders."""
        async with asyncio.timeout(_SETTLED_WITHIN_S):
            while True:
                with contextlib.suppress(DynamoError):
                    await self.ask(LIST_ENDPOINTS)
                    return
                if self.server.popen.poll() is not None:
                    raise ServerError(f"the server ended:\n{self.server.last_lines()}")
                await asyncio.sleep(_POLL_S)

    async def settled(self) -> float:
        """Wait until the server has what was ordered. Returns the seconds that took. Raises ServerError."""
        begun = time.monotonic()
        while (wrong := await self._differences()) and time.monotonic() - begun < _SETTLED_WITHIN_S:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        if wrong:
            raise ServerError(f"not what was ordered: {'; '.join(wrong)}")
        return time.monotonic() - begun

    async def delete_all(self) -> None:
        for name in tuple(self.expected):
            await self.ask(DELETE_ENDPOINT, name)
        self.expected = {}

    async def _differences(self) -> list[str]:
        """What is not as it was ordered."""
        views = [view_of(content) for content in (await self.ask(LIST_ENDPOINTS))["data"]]
        wrong = [f"{v.spec.name} is {v.status.state}: {v.status.reason}" for v in views if v.status.state != "ready"]
        if self._registered() != self.expected or {v.spec.name for v in views} != set(self.expected):
            wrong.append(f"the registry has {sorted(self._registered())}, ordered were {sorted(self.expected)}")
        wanted = {v.spec.name: v.status.wanted for v in views}
        workers = [c for c in self._state().components.values() if c.watcher.revision and c.holds]
        held = Counter(c.watcher.revision.partition("@")[0] for c in workers)
        if held != Counter(wanted):
            wrong.append(f"workers hold devices: {dict(held)}, wanted are {wanted}")
        pids = {c.pid for c in workers}
        environ = leftovers(self.paths, ProcFs().snapshot())
        running_workers = {process.pid for process in environ if "@" in _watcher_of(process.pid)}
        if running_workers != pids:
            wrong.append(f"processes of workers: {sorted(running_workers)}, claims are of {sorted(filter(None, pids))}")
        graphs = {path.stem for path in self.paths.graph_of("x@1").parent.glob("*.json")}
        if graphs != {c.watcher.revision for c in workers}:
            wrong.append(f"graph files of {sorted(graphs)}")
        return wrong

    def _registered(self) -> dict[str, EndpointSpec]:
        return {name: entry.spec for name, entry in read_registry(self.paths).entries.items()}

    def _state(self) -> State:
        return StateStore(self.paths).read()


def _paths_of(server: Server) -> StatePaths:
    assert server.state_root is not None, "a server of ours has a state folder"
    return StatePaths(server.state_root, NAMESPACE)


def _watcher_of(pid: int) -> str:
    """The watcher in a process's environment; empty if the process has ended."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((e.partition(b"=")[2].decode() for e in entries if e.startswith(b"DYN_WATCHER=")), "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--orders", type=int, default=1000, help="number of orders and kills")
    parser.add_argument("--seed", type=int, default=1)


async def run(arguments: argparse.Namespace) -> Figures:
    """Order, print, and return the figures. Raises ServerError if there is not what was ordered."""
    number = 100 if arguments.quick else arguments.orders
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_endpoints(Path(scratch), [], (f"--cpu-slots={_SLOTS}",))
        async with running(server):
            await server_is_up(server)
            orders = Orders(server, Path(scratch), random.Random(arguments.seed))
            await orders.reachable()
            for each in range(number):
                await orders.give(each)
                if each % 50 == 49:
                    progress(f"{each + 1} of {number} orders")
            took_s = time.monotonic() - begun
            settled_s = await orders.settled()
            progress(f"as ordered after {settled_s:.1f} s: {', '.join(orders.expected) or 'no endpoint'}")
            await orders.delete_all()
            emptied_s = await orders.settled()
    figures: Figures = {
        "orders": dict(sorted(orders.counts.items())),
        "seconds": took_s,
        "settled_s": settled_s,
        "emptied_s": emptied_s,
    }
    save(arguments.json, "endpoints-orders", figures)
    table("Orders", ["order", "number"], [[kind, str(count)] for kind, count in sorted(orders.counts.items())])
    return figures


async def server_is_up(server: Server) -> None:
    """Wait until the bus of the server can be found. Raises ServerError if the server ends."""
    async with asyncio.timeout(_SETTLED_WITHIN_S):
        while not _paths_of(server).board_file.exists():  # a foreign process
            if server.popen.poll() is not None:
                raise ServerError(f"the server ended:\n{server.last_lines()}")
            await asyncio.sleep(_POLL_S)
