"""The node servers of a graph, as its head sees them: started and ended by the cluster, asked over the bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from dynamo_local.core.errors import NodeStartError, SilentNodeError, SupervisorError
from dynamo_local.core.names import LOCAL_NODE
from dynamo_local.supervisor.places.cluster import Cluster, ClusterNode
from dynamo_local.supervisor.places.far import FarPlaces
from dynamo_local.supervisor.places.port import Place, Status

_ASKS = 3
"""Before a node server counts as silent where something hangs on it: one answer may be lost while NATS restarts."""

_FAILED_S = 60.0
"""A node on which no node server could be had is chosen after others for so long."""


@dataclass
class NodeServers:
    """Node servers by node. `node(id)`: the places of one. `order(node)`: what it is started with. `graph(revision)`:
    the graph of an endpoint's revision as JSON. `ask_again_s`: between two asks of one that did not answer."""

    cluster: Cluster
    node: Callable[[str], FarPlaces]
    order: Callable[[ClusterNode], bytes]
    graph: Callable[[str], bytes]
    ask_again_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    _failed: dict[str, float] = field(default_factory=dict, init=False)
    """When no node server could be had on a node, by node."""
    _started: set[str] = field(default_factory=set, init=False)
    """Nodes whose node server was started from here, and not ended."""
    starting: set[str] = field(default_factory=set, init=False)
    """Nodes whose node server is being started from here."""
    _given_up: set[str] = field(default_factory=set, init=False)
    """Nodes whose node server did not answer, and was ended by the cluster: nothing runs there."""

    def may_run(self, nodes: Mapping[str, ClusterNode], node: str) -> bool:
        """Whether a node server may run there, as far as the cluster knows."""
        return node in nodes and nodes[node].is_alive and node not in self._given_up

    @property
    def failed(self) -> frozenset[str]:
        """Nodes on which no node server could be had lately."""
        return frozenset(node for node, at in self._failed.items() if self.clock() - at < _FAILED_S)

    async def place(self, node: str) -> Place | None:
        """The place of a node server, under the node's name; None if it does not answer."""
        try:
            place = (await self.node(node).places())[LOCAL_NODE]
        except SupervisorError:
            return None
        self._failed.pop(node, None)
        return replace(place, node=node)

    async def places(self, nodes: Collection[str]) -> dict[str, Place]:
        """The places of those that answer. All are asked at the same time."""
        found = await asyncio.gather(*map(self.place, nodes))
        return {place.node: place for place in found if place is not None}

    async def statuses(self, nodes: Collection[str]) -> dict[str, Mapping[str, Status]]:
        """The statuses on those that answer. All are asked at the same time."""
        found = await asyncio.gather(*map(self._statuses, nodes))
        return {node: told for node, told in zip(nodes, found, strict=True) if told is not None}

    async def check_answers(self, node: str) -> None:
        """Raise SilentNodeError if a node server answers none of several asks."""
        if not await self._answers(node):
            raise SilentNodeError(f"node {node} does not answer", "what runs there is unknown until it does")

    async def have(self, name: str, is_heard: Callable[[str], Awaitable[bool]]) -> None:
        """Have a node server of this graph's server answer on the node. Raises SilentNodeError, also where workers are
        heard of one that does not answer; NodeStartError if it does not start; SupervisorError. `is_heard(node)`:
        whether a process that is claimed there has a presence on the bus."""
        try:
            await self._have(name, is_heard)
        except (NodeStartError, SilentNodeError):
            self._failed[name] = self.clock()
            raise

    async def _have(self, name: str, is_heard: Callable[[str], Awaitable[bool]]) -> None:
        if await self.place(name) is not None:
            return
        if name in self._started:
            if await self._answers(name):
                return
            if await is_heard(name):
                raise SilentNodeError(f"node {name} does not answer, and its workers are heard", "try again")
        node = (await self.cluster.nodes()).get(name)
        if node is None or not node.is_alive:
            raise SilentNodeError(f"node {name} is gone", "try again")
        # One that runs and does not answer was started by another server, or hangs without a worker.
        await self.end(name)
        self.starting.add(name)
        try:
            await self.cluster.start_node(name, self.order(node))
            self._started.add(name)
            self._given_up.discard(name)
            await self.check_answers(name)
        finally:
            self.starting.discard(name)

    async def learn(self, node: str, revision: str) -> None:
        """Have a node server know the graph of an endpoint's revision. It forgets those of which it has no worker."""
        await self.node(node).learn(revision, await asyncio.to_thread(self.graph, revision))

    async def end(self, node: str) -> None:
        """Have the cluster end a node server that nobody needs any more."""
        await self.cluster.end_node(node)
        self._started.discard(node)

    async def give_up(self, node: str) -> None:
        """Have the cluster end a node server that does not answer: nothing of it runs then. Raises SupervisorError."""
        if await self.place(node) is not None:
            # It was only starting.
            return
        await self.end(node)
        self._given_up.add(node)

    async def _answers(self, node: str) -> bool:
        for ask in range(_ASKS):
            if ask:
                await asyncio.sleep(self.ask_again_s)
            if await self.place(node) is not None:
                return True
        return False

    async def _statuses(self, node: str) -> Mapping[str, Status] | None:
        try:
            return await self.node(node).statuses()
        except SupervisorError:
            return None
