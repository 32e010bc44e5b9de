"""What a graph has reserved with its cluster, by watcher. Only the head's server changes it, and nodes that die do."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from dynamo_local.core.errors import DeviceError, SupervisorError
from dynamo_local.core.names import Watcher
from dynamo_local.core.shares import held
from dynamo_local.supervisor.places.cluster import Cluster, Slot
from dynamo_local.supervisor.places.port import Need

_KNOWN_S = 1.0
"""While a worker starts, its status is asked for several times a second, and the cluster may take long to answer."""

_SETTLES_S = 1.0
"""For the cluster's count of what is free to show what was given back. Ray takes some tenths of a second."""


@dataclass
class Slots:
    """The reservations of one namespace, each under the name NAMESPACE/WATCHER."""

    cluster: Cluster
    namespace: str
    clock: Callable[[], float] = time.monotonic
    _known: tuple[float, Mapping[str, Slot]] = field(default=(-math.inf, {}), init=False)
    _amounts: dict[str, float] = field(default_factory=dict, init=False)
    """Devices, or the share of one, that are reserved for each watcher, or are about to be."""
    _nodes: dict[str, str] = field(default_factory=dict, init=False)
    """The node on which something was reserved for each watcher."""
    _given_back: dict[str, tuple[float, str, float]] = field(default_factory=dict, init=False)
    """When something was given back for a watcher, on which node, and how much."""

    async def all(self) -> Mapping[str, Slot]:
        """What is reserved, as of _KNOWN_S ago at most."""
        known, now = self._known, self.clock()
        if now - known[0] < _KNOWN_S:
            return known[1]
        found = await self.cluster.reservations()
        prefix = f"{self.namespace}/"
        slots = {name.removeprefix(prefix): slot for name, slot in found.items() if name.startswith(prefix)}
        if self._known is known:
            # Nothing was reserved or given back meanwhile.
            self._known = (now, slots)
        return slots

    async def reserve(self, watcher: Watcher, need: Need, avoid: Collection[str] = ()) -> Slot:
        """Reserve with the cluster (cluster.Cluster). Raises DeviceError, which says for whom."""
        # Before it is there: somebody may count meanwhile.
        name, amount = str(watcher), held(need.devices, need.share)
        self._amounts.setdefault(name, amount)
        try:
            slot = await self.cluster.reserve(self._name(name), need, avoid)
            self._nodes[name] = slot.node
            return slot
        except DeviceError as error:
            self._amounts.pop(name, None)
            needed = f"{need.devices} device{'' if need.devices == 1 else 's'}"
            raise DeviceError(f"{watcher.service} needs {needed}: {error.cause}", error.remedy) from error
        finally:
            self._forget()

    async def release(self, watcher: str) -> None:
        """Give back what is reserved for the watcher. Harmless if there is nothing."""
        try:
            await self.cluster.release(self._name(watcher))
        finally:
            self._forget()
        amount, node = self._amounts.pop(watcher, 0.0), self._nodes.pop(watcher, None)
        if node is not None:
            self._given_back[watcher] = self.clock(), node, amount

    def unclaimed(self, claimed: Collection[str], slots: Mapping[str, Slot]) -> list[tuple[str, float]]:
        """Nodes and amounts of those of the slots whose watchers are not claimed, yet or any more, and of what was
        given back just now: others hold none of it, although the cluster does not count it as free."""
        now = self.clock()
        self._given_back = {name: one for name, one in self._given_back.items() if now - one[0] < _SETTLES_S}
        found = [(slot.node, self._amounts.get(name, 0.0)) for name, slot in slots.items() if name not in claimed]
        settling = [(node, amount) for name, (_, node, amount) in self._given_back.items() if name not in slots]
        return found + settling

    async def clear(self, nodes: Collection[str] = ()) -> None:
        """Release all that is reserved, and end the node servers there and on those `nodes`. Tries all, then raises the
        first error."""
        self._forget()
        ending = asyncio.gather(*map(self.cluster.end_node, nodes), return_exceptions=True)
        slots: Mapping[str, Slot] = {}
        failures: list[BaseException | None] = []
        try:
            slots = await self.all()
        except SupervisorError as error:
            failures.append(error)
        others = {slot.node for slot in slots.values()}.difference(nodes)
        failures += await ending
        failures += await asyncio.gather(*map(self.cluster.end_node, others), return_exceptions=True)
        failures += await asyncio.gather(*map(self.release, slots), return_exceptions=True)
        for failure in failures:
            if failure is not None:
                raise failure

    def _forget(self) -> None:
        """Have the cluster asked anew, also by whoever is asking at the moment."""
        self._known = (-math.inf, {})

    def _name(self, watcher: str) -> str:
        return f"{self.namespace}/{watcher}"
