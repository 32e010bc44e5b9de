"""What endpoints hold of a machine's memory, and what of it would have to go for more of their workers. Pure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.core.errors import MemoryShortError
from dynamo_local.core.names import Revision, Watcher, endpoint_of
from dynamo_local.core.sizing.machine import size
from dynamo_local.process.forkserver.prepared.orders import Found, read_orders, withdraw
from state.machine.memory import memory_of
from state.machine.processes import descendants
from state.paths import StatePaths
from state.statefile.model import State


@dataclass(frozen=True)
class Holding:
    """What one endpoint holds, in bytes. `workers`: its processes, None if that is not known. `weights`: the processes
    that keep its weights for further workers."""

    endpoint: str
    workers: int | None = 0
    weights: int = 0


def weights_to_give_up(unused: Mapping[str, int], missing: int) -> tuple[str, ...]:
    """The kept weights, by key, to give up so that so many bytes more are free: as few as are enough. None if all
    together are not. `unused`: bytes of those whose endpoints have no worker."""
    chosen: list[str] = []
    for key in sorted(unused, key=lambda key: (-unused[key], key)):
        if missing <= 0:
            break
        chosen.append(key)
        missing -= unused[key]
    return tuple(chosen) if missing <= 0 else ()


def explained(short: MemoryShortError, holdings: Sequence[Holding]) -> MemoryShortError:
    """The error with the endpoints that hold memory, largest first, in place of its remedy."""
    lines = [_line(each) for each in sorted(holdings, key=_size, reverse=True) if each.workers != 0 or each.weights]
    if not lines:
        return short
    go = f"{size(short.missing)} would have to go: {', '.join(lines)}"
    return MemoryShortError(
        short.cause, f"{go}; lower the workers of one, delete it, or end other programs", short.missing
    )


def _size(holding: Holding) -> int:
    return (holding.workers or 0) + holding.weights


def _line(holding: Holding) -> str:
    parts = ["an unknown amount" if holding.workers is None else size(holding.workers)] if holding.workers != 0 else []
    parts += [f"{size(holding.weights)} of weights for its next worker"] if holding.weights else []
    return f"endpoint {holding.endpoint} holds {' and '.join(parts)}"


# Memory for more workers of an endpoint: what is shared, what can be given up, and who holds the rest.

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
        return max((held for (_, held), mine in self._kept().items() if str(revision) in mine), default=0)

    def holdings(self, apart_from: str) -> tuple[Holding, ...]:
        """What each endpoint holds. Blocks for some milliseconds for each process."""
        state = self.read_state()
        pids: dict[str, set[int]] = {}
        for component in state.here.values():
            if component.pid is not None and component.watcher.revision:
                pids.setdefault(endpoint_of(component.watcher.revision), set()).update(descendants(component.pid))
        weights: dict[str, int] = {}
        for (_, weight_bytes), revisions in self._kept().items():
            # Several endpoints may use the same: each would have to let go of it.
            for endpoint in {endpoint_of(revision) for revision in revisions}:
                weights[endpoint] = weights.get(endpoint, 0) + weight_bytes
        names = sorted((pids.keys() | weights.keys()) - {"", apart_from})
        return tuple(
            Holding(name, self.memory_of(frozenset(pids.get(name, ()))), weights.get(name, 0)) for name in names
        )

    async def _give_up_weights(self, revision: Revision, missing: int) -> bool:
        """Have kept weights go that no worker uses, if that is enough. Their next worker loads them again."""
        kept = await asyncio.to_thread(self._kept)
        state = await asyncio.to_thread(self.read_state)
        used = {c.watcher.revision for c in state.components.values() if c.holds} | {str(revision)}
        unused = {key: held for (key, held), revisions in kept.items() if not revisions & used}
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
