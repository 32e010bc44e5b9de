"""Orders about endpoints that are broken off: whoever gives them, the frontend that passes them on, or the server is
killed at any moment meanwhile. Each either holds whole or not at all, one that was answered holds, and one that is
given again makes no second revision.

Endpoints are mockers without a worker, so that orders alone are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.endpoints.orders import Orders, server_is_up
from benchmarks.faults.parts import Parts
from benchmarks.harness.client import HOST
from benchmarks.harness.report import Figures, progress, save, table
from benchmarks.harness.servers import Server, ServerError, running, serve_again, start_endpoints
from dynamo_local.control.operations import CREATE_ENDPOINT, CREATE_KEY, DELETE_ENDPOINT, UPDATE_ENDPOINT, Operation
from dynamo_local.core.endpoints.registry import Entry
from dynamo_local.core.errors import DynamoError, UsageError
from state.endpoints.registry import read_registry
from state.files import sockets_of

SUMMARY = "1,000 orders broken off by kills of client, frontend and server: is none lost, and none done twice?"

_OPTIONS = ("--cpu-slots=8", "--frontends=4")
_WITHIN_S = 0.08
"""The kill comes so long after the order at most: half of them are answered by then."""
_ANSWER_S = 30.0
_UP_WITHIN_S = 180.0
_LOOK_EVERY_S = 0.1
_VICTIMS = {"client": 16, "frontend": 1, "server": 3}
"""How often each is killed. A frontend that was killed often is started again after 30 s only."""


@dataclass
class BrokenOff:
    """Orders about endpoints, each of which is broken off."""

    server: Server
    orders: Orders
    random: random.Random
    secret: str
    """Of an administrator's key, with which frontends take orders."""
    counts: Counter[str] = field(default_factory=Counter)
    number: int = 0

    async def give(self, victim: str) -> None:
        """Break an order off, look at what came of it, and give it again. Raises ServerError for what must not be."""
        operation, name, fields = self._order()
        before = self._entry(name)
        answered = await self._break_off(victim, operation, name, fields)
        after = self._entry(name)
        done = not _same(before, after)
        self._check(operation, before, after, f"{operation.name} of {name}, {victim} killed")
        if answered and not done:
            raise ServerError(f"{operation.name} of {name} was answered and is lost; {victim} killed")
        with contextlib.suppress(UsageError):
            await self.orders.ask(operation, name, fields)
        again = self._entry(name)
        if done and not _same(again, after):
            raise ServerError(f"{operation.name} of {name} was done twice; {victim} killed")
        self._check(operation, before, again, f"{operation.name} of {name} again")
        self.counts[f"{victim}: {'answered' if answered else 'done unanswered' if done else 'not done'}"] += 1

    def _order(self) -> tuple[Operation, str, Any]:
        """An order that changes something."""
        self.number += 1
        name = self.random.choice(("ant", "bee", "cat"))
        if self._entry(name) is None:
            fields = {"name": name, "model": "random", "engine": "mocker", "min_workers": 0, "max_workers": 1}
            return CREATE_ENDPOINT, name, fields
        if self.random.random() < 0.3:
            return DELETE_ENDPOINT, name, None
        return UPDATE_ENDPOINT, name, {"args": {"seed": self.number}}

    async def _break_off(self, victim: str, operation: Operation, name: str, fields: Any) -> bool:
        """Give the order, and kill at a random moment. Returns whether it was answered."""
        kill_after_s = self.random.random() * _WITHIN_S
        path, body = operation.path_for({"name": name}), b"" if fields is None else msgspec.json.encode(fields)
        if victim == "client":
            return await self._leave(f"{operation.method} {path}", body, kill_after_s)
        if victim == "frontend":
            frontends = await self._frontends()
            asking = asyncio.create_task(self._by_http(operation.method, path, fields))
            await asyncio.sleep(kill_after_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.random.choice(frontends), signal.SIGKILL)
            return await asking
        asking = asyncio.create_task(self._by_socket(operation, name, fields))
        await asyncio.sleep(kill_after_s)
        self.server.popen.kill()
        await asyncio.to_thread(self.server.popen.wait)
        answered = await asking
        await serve_again(self.server, ("-f", str(self.server.log.with_name("endpoints.yaml")), *_OPTIONS))
        await self.orders.reachable()
        return answered

    async def _leave(self, line: str, body: bytes, after_s: float) -> bool:
        """As a client that is killed: its connection is closed, whatever was sent by then."""
        reader, writer = await asyncio.open_unix_connection(sockets_of(self.orders.paths).control)
        head = f"{line} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        cut = self.random.choice((len(head) + len(body), self.random.randrange(len(head) + len(body))))
        writer.write((head + body)[:cut])
        answer = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                answer = await reader.readline()
        writer.close()
        if cut == len(head) + len(body):
            # It has been sent, and may still be on its way: the orders of one connection after another are in turn.
            await self.orders.reachable()
        return b" 20" in answer

    async def _frontends(self) -> list[int]:
        """Wait until two frontends are there, and one answers. Returns their pids."""
        async with asyncio.timeout(_UP_WITHIN_S):
            while True:
                found = [process.pid for process in Parts(self.server).processes().get("frontend", ())]
                if len(found) >= 2 and await self._by_http("GET", "/v1/models"):
                    return found
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _by_socket(self, operation: Operation, name: str, fields: Any) -> bool:
        try:
            await self.orders.ask(operation, name, fields)
        except DynamoError:
            return False
        return True

    async def _by_http(self, method: str, path: str, fields: Any = None) -> bool:
        try:
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{self.server.port}", trust_env=False) as client:
                key = {"authorization": f"Bearer {self.secret}"}
                answer = await client.request(method, path, json=fields, headers=key, timeout=_ANSWER_S)
        except httpx.HTTPError:
            return False
        if answer.status_code in (401, 403):
            raise ServerError(f"the frontend takes no orders: {answer.text}")
        return answer.is_success

    def _entry(self, name: str) -> Entry | None:
        return read_registry(self.orders.paths).entries.get(name)

    def _check(self, operation: Operation, before: Entry | None, after: Entry | None, what: str) -> None:
        """Raise ServerError unless the order was done once, or not at all."""
        if operation is UPDATE_ENDPOINT:
            given = {0, 1} if before is not None and after is not None else set()
            fits = (
                bool(given)
                and after is not None
                and before is not None
                and (after.last_revision - before.last_revision in given)
            )
        else:
            fits = after is None or before is None or _same(before, after)
        if not fits:
            raise ServerError(f"{what}: {before} became {after}")


def _same(one: Entry | None, other: Entry | None) -> bool:
    """Whether both are the same endpoint with the same revisions. Whether an update is settled is the server's."""
    if one is None or other is None:
        return one is other
    return (one.order, one.last_revision) == (other.order, other.last_revision)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--orders", type=int, default=1000, help="number of orders, and of kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kill", nargs="+", choices=list(_VICTIMS), default=list(_VICTIMS), help="what is killed (all)"
    )


async def run(arguments: argparse.Namespace) -> Figures:
    """Order and kill, print, and return the figures. Raises ServerError at the first order that is lost or done
    twice."""
    number = 50 if arguments.quick else arguments.orders
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_endpoints(Path(scratch), [], _OPTIONS)
        async with running(server):
            await server_is_up(server)
            orders = Orders(server, Path(scratch), draw)
            await orders.reachable()
            key = await orders.ask(CREATE_KEY, fields={"name": "orders", "admin": True})
            broken_off = BrokenOff(server, orders, draw, key["secret"])
            # Servers last: their frontends need not have started for orders on the socket.
            victims = sorted(draw.choices(arguments.kill, [_VICTIMS[each] for each in arguments.kill], k=number))
            for each, victim in enumerate(victims):
                await broken_off.give(victim)
                if each % 50 == 49:
                    progress(f"{each + 1} of {number} orders")
    counts = dict(sorted(broken_off.counts.items()))
    figures: Figures = {"orders": counts}
    save(arguments.json, "order-kills", figures)
    table("Orders that were broken off", ["killed: outcome", "number"], [[k, str(v)] for k, v in counts.items()])
    return figures
