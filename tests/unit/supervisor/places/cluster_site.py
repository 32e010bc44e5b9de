"""A graph on two nodes, all in memory: the cluster, the bus, and what runs on the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from dynamo_local.bus.nats import Bus, Subscription
from dynamo_local.core import codec
from dynamo_local.core.codec import Message
from dynamo_local.core.errors import BusError, DynamoError, NobodyListensError
from dynamo_local.core.names import Watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.node.places import NodePlaces
from dynamo_local.supervisor.places.clustered import ClusterPlaces, Slots
from dynamo_local.supervisor.places.far import FarPlaces, PlacesRequest, PlacesService
from dynamo_local.supervisor.places.local import LocalPlaces
from dynamo_local.supervisor.places.node_servers import NodeServers
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.tasks import TaskGuard
from state.devices.allocation import Inventory, cpu_slots
from state.statefile.transitions import add_template, claim
from tests.memory_cluster import MemoryCluster
from tests.places_contract import NAMESPACE, ONE, worker
from tests.unit.supervisor.actuator.fake_ports import BooksWithoutThreads, FakePorts

SUBJECTS = Subjects(NAMESPACE)
_Handler = Callable[[Message], Awaitable[Message]]


class MemoryBus:
    """`missed`: number of requests to a subject that get no answer from now on. `lost`: kinds of requests that are
    carried out, and whose answers are lost, with the number of requests that are missed then. `asked`: subjects, in
    order. `most_at_once`: requests under way."""

    def __init__(self) -> None:
        self.missed: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        self.asked: list[str] = []
        self.most_at_once = 0
        self.handlers: dict[str, _Handler] = {}
        self._under_way = 0

    async def serve(self, subject: str, kind: object, handler: _Handler, *, tasks: TaskGuard) -> Subscription:
        self.handlers[subject] = handler
        return cast("Subscription", None)

    async def ask(self, subject: str, message: Message, reply: Any, *, timeout_s: float) -> Any:
        self.asked.append(subject)
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            await asyncio.sleep(0)
            answer = await self._answered(subject, codec.decode(codec.encode(message), PlacesRequest))
            return codec.decode(codec.encode(answer), reply)
        finally:
            self._under_way -= 1

    async def _answered(self, subject: str, request: Message) -> Message:
        if subject not in self.handlers:
            raise NobodyListensError(f"no process listens on {subject}")
        if self.missed.get(subject, 0) > 0:
            self.missed[subject] -= 1
            raise BusError(f"no answer on {subject}")
        reply = await self.handlers[subject](request)
        if (missed := self.lost.get(type(request).__name__)) is not None:
            self.missed[subject] = missed
            raise BusError(f"no answer on {subject}")
        return reply


class ClusterInMemory:
    """`heard`: watchers with a presence. `ended`: nodes whose node server the cluster has ended, in order.
    `given_up`: workers that a node does not start again, each with the reason, by node. `refusal`: why no node can run
    the graph's workers."""

    def __init__(self, tasks: TaskGuard) -> None:
        self.head = FakePorts()
        self.books = BooksWithoutThreads(self.head)
        self.heard: set[str] = set()
        self.ended: list[str] = []
        self.given_up: dict[str, dict[str, str]] = {"a": {}, "b": {}}
        self.refusal: DynamoError | None = None
        self.memory_bus = MemoryBus()
        self.machines = {node: FakePorts() for node in ("a", "b")}
        self._tasks = tasks
        self.cluster = MemoryCluster(dict.fromkeys(self.machines, 2), self._start, self._end)
        bus = cast("Bus", self.memory_bus)
        servers = NodeServers(
            self.cluster,
            node=lambda name: FarPlaces(bus, SUBJECTS.node(name), f"node {name}"),
            order=lambda node: node.node.encode(),
            graph=lambda _: b"",
            ask_again_s=0.0,
        )
        local = LocalPlaces(self.books, Inventory("cpu-slot", ()), self.head, self.head, _log)
        slots = Slots(self.cluster, NAMESPACE)
        self.places = ClusterPlaces(servers, slots, self.books, local, heard=lambda: self.heard, kind="cpu-slot")

    async def worker(self, index: int) -> tuple[Watcher, str]:
        """A worker that runs. Returns its watcher and its node."""
        watcher = worker(index)
        await self.books.update(lambda state: add_template(state, worker(), "decode", "main@1"))
        made = await self.places.reserve(watcher, ONE)
        await self.books.update(
            lambda state: claim(state, watcher, role="decode", cmd="run", devices=made.devices, node=made.node)
        )
        await self.places.start(
            WatcherPlan(watcher, "decode", ("run",), {}, made.devices, node=made.node, revision="main@1")
        )
        return watcher, made.node

    def miss(self, node: str, requests: int) -> None:
        """Have a node server answer none of the next requests."""
        self.memory_bus.missed[SUBJECTS.node(node)] = requests

    def reserved_on(self, node: str) -> set[str]:
        """What a node server has reserved."""
        return {name for name, entry in self.machines[node].state.components.items() if entry.holds}

    async def _start(self, node: str, order: bytes) -> None:
        machine = self.machines[node] = FakePorts()
        books = BooksWithoutThreads(machine)
        slots = cpu_slots(range(2), 2)
        places = NodePlaces(books, slots, machine, machine, _log, self._planned, self.given_up[node])
        service = PlacesService(places, self._tasks, _learn)
        await service.serve(cast("Bus", self.memory_bus), SUBJECTS.node(node))

    def _planned(self, asked: WatcherPlan) -> WatcherPlan:
        if self.refusal is not None:
            raise self.refusal
        return replace(asked, argv=("run",), environment={"KEEP": "me"})

    async def _end(self, node: str) -> None:
        self.ended.append(node)
        self.memory_bus.handlers.pop(SUBJECTS.node(node), None)


async def _learn(revision: str, graph: bytes) -> None:
    """The graph of all workers is the same."""


def _log(_: str) -> Path:
    return Path("/nonexistent/log")
