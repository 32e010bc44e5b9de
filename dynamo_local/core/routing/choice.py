"""A routing policy's choice, and what it is made from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routes import WeighedWorker
from dynamo_local.core.messages.routing import AssignRequest
from dynamo_local.core.routing.caches.block_keys import KEY_BYTES, number_of
from dynamo_local.core.routing.ledger import Ledger

_64_BITS = (1 << 64) - 1
_MIXER = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True)
class RoutingChoice:
    """The worker for a request. `cached`: leading tokens of the context that it is expected to have; None: not known.
    `pull_from`: worker with more of them. `costs`: those of all candidates, in their order."""

    worker: str
    cached: int | None = None
    pull_from: str | None = None
    costs: tuple[WeighedWorker, ...] = ()


class RoutingPolicy(Protocol):
    """Chooses a worker. Alike in every router that knows the same: the order of the candidates does not matter."""

    @property
    def needs_blocks(self) -> bool:
        """Whether requests are to say which blocks their contexts have."""

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        """Choose from workers that are all routable. None if there are none. `now`: CLOCK_MONOTONIC, in seconds.

        Workers in `request.avoid` are chosen only if there is no other. Raises DecodeError if `request.blocks` are no
        keys.
        """


def not_avoided(request: AssignRequest, candidates: Sequence[Presence]) -> Sequence[Presence]:
    """The candidates that have not just failed the request; all if there are no others."""
    return [each for each in candidates if each.lease not in request.avoid] or candidates


def lot(text: str, worker: Presence) -> int:
    """A number that is alike in every process and otherwise as if drawn by lot, for a text and a worker."""
    mixed = (_digest(text) ^ _digest(worker.lease)) * _MIXER & _64_BITS
    return (mixed ^ mixed >> 32) * _MIXER & _64_BITS


def cached_tokens(request: AssignRequest, ledger: Ledger) -> Mapping[str, int]:
    """Leading tokens of the context that each worker need not compute, by lease; workers with none are left out.

    A whole context is never cached: the last token is computed in any case.
    """
    if request.block_tokens < 1:
        return {}
    most = max((request.tokens - 1) // request.block_tokens, 0)
    known = min(number_of(request.blocks), most)
    found = ledger.index.cached(request.blocks[: known * KEY_BYTES])
    return {worker: blocks * request.block_tokens for worker, blocks in found.items()}


def weighed(
    request: AssignRequest, worker: Presence, ledger: Ledger, cached: Mapping[str, int], cost: float = 0.0
) -> WeighedWorker:
    """The figures of one candidate."""
    has = cached.get(worker.lease, 0)
    # What the worker gave up for want of room, it computes again before it computes what comes now.
    recomputed = 0 if worker.load is None else worker.load.preempted_tokens or 0
    queued, requests = ledger.uncached(worker.lease) + recomputed, ledger.requests(worker.lease)
    return WeighedWorker(worker.lease, cost, has, max(request.tokens - has, 0), queued, requests)


@lru_cache(maxsize=4_096)
def _digest(text: str) -> int:
    """Kept, because leases are asked for again and again."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
