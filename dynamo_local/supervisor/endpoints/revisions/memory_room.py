"""Memory for more workers of an endpoint: what is shared, what can be given up, and who holds the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynamo_local.core.endpoints.memory import Holding, explained, weights_to_give_up
from dynamo_local.core.errors import MemoryShortError
from dynamo_local.core.names import Revision, Watcher, endpoint_of
from dynamo_local.process.forkserver.prepared.orders import Found, read_orders, withdraw
from state.machine.memory import memory_of
from state.machine.processes import descendants
from state.paths import StatePaths
from state.statefile.model import State

_log = logging.getLogger(__name__)

_GONE_WITHIN_S = 3.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class MemoryRoom:
    """The memory of one server's endpoints. `memory_of`: bytes that processes hold, None if not known."""

    paths: StatePaths
    read_state: Callable[[], State]
    memory_of: Callable[[frozenset[int]], int | None] = memory_of

    async def require(self, revision: Revision, check: Callable[[], None]) -> None:
        """Run `check`, in a thread; where it finds too little memory, once more when weights are given up that no
        worker uses. Raises what it raises; MemoryShortError names the endpoints that hold memory."""
        try:
            try:
                await asyncio.to_thread(check)
            except MemoryShortError as short:
                if not await self._give_up_weights(revision, short.missing):
                    raise
                await asyncio.to_thread(check)
        except MemoryShortError as short:
            raise explained(short, await asyncio.to_thread(self.holdings, revision.endpoint)) from short

    def shared_bytes(self, revision: Revision) -> int:
        """Bytes of weights that the next worker of the revision finds in memory. Blocks."""
        return max((size for (_, size), mine in self._kept().items() if str(revision) in mine), default=0)

    def holdings(self, apart_from: str) -> tuple[Holding, ...]:
        """What each endpoint holds. Blocks for some milliseconds for each process."""
        state = self.read_state()
        pids: dict[str, set[int]] = {}
        for component in state.here.values():
            if component.pid is not None and component.watcher.revision:
                pids.setdefault(endpoint_of(component.watcher.revision), set()).update(descendants(component.pid))
        weights: dict[str, int] = {}
        for (_, size), revisions in self._kept().items():
            # Several endpoints may use the same: each would have to let go of it.
            for endpoint in {endpoint_of(revision) for revision in revisions}:
                weights[endpoint] = weights.get(endpoint, 0) + size
        names = sorted((pids.keys() | weights.keys()) - {"", apart_from})
        return tuple(
            Holding(name, self.memory_of(frozenset(pids.get(name, ()))), weights.get(name, 0)) for name in names
        )

    async def _give_up_weights(self, revision: Revision, missing: int) -> bool:
        """Have kept weights go that no worker uses, if that is enough. Their next worker loads them again."""
        kept = await asyncio.to_thread(self._kept)
        state = await asyncio.to_thread(self.read_state)
        used = {c.watcher.revision for c in state.components.values() if c.holds} | {str(revision)}
        unused = {key: size for (key, size), revisions in kept.items() if not revisions & used}
        chosen = weights_to_give_up(unused, missing)
        for (key, _), revisions in kept.items():
            if key in chosen:
                _log.info("memory is short: the weights that are kept for %s go", ", ".join(sorted(revisions)))
                for each in revisions:
                    await asyncio.to_thread(withdraw, self.paths, each)
        for _ in range(int(_GONE_WITHIN_S / _LOOK_S)):
            if not any(self.paths.prepared_socket(key).exists() for key in chosen):
                break
            await asyncio.sleep(_LOOK_S)
        return bool(chosen)

    def _kept(self) -> Mapping[tuple[str, int], frozenset[str]]:
        """Weights that are kept now, by key and bytes, with the revisions that use them."""
        orders: Mapping[Watcher, Found] = read_orders(self.paths)
        kept: dict[tuple[str, int], frozenset[str]] = {}
        for watcher, found in orders.items():
            key = found.order.key
            if self.paths.prepared_socket(key).exists():
                of = key, found.order.weight_bytes
                kept[of] = kept.get(of, frozenset()) | {watcher.revision}
        return kept
