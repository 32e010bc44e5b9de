"""Warm requests: contexts that are computed for one token, which is thrown away, so that their KV is in the cache.

They pull the KV that another worker has; one that would have to compute much is not run. Warm requests belong to the
worker: frontends do not hear of them, and they are not counted in the load that the worker announces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from components.workers.kv_puller import KvPuller
from components.workers.requests.epoch_events import EpochEvents
from dynamo_local.core.errors import EngineError, RequestError
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Engine, PulledPrefix

MAX_COMPUTED_BLOCKS = 2
"""Full blocks computed for a warm request. KV of which more cannot be pulled is better left where it is."""

ONE_TOKEN = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 1, "temperature": 0.0}))
"""Sampling parameters of warm requests."""


@dataclass(frozen=True)
class WarmOutcome:
    """What came of a warm request. `refused`: why it was not run to its end. `pulled`: what was pulled for it."""

    refused: str | None = None
    pulled: PulledPrefix | None = None

    @property
    def blocks(self) -> int:
        """Number of full blocks that were pulled."""
        return 0 if self.pulled is None else self.pulled.answer.blocks - self.pulled.cached


class WarmRequests:
    """Those of one engine."""

    def __init__(self, engine: Engine, puller: KvPuller, epoch_events: EpochEvents) -> None:
        self._engine = engine
        self._kv_puller = puller
        self._epoch_events = epoch_events
        self._in_engine: set[RequestEpoch] = set()

    def are_running(self) -> bool:
        """Whether the engine has any."""
        return bool(self._in_engine)

    def without(self, load: Load) -> Load:
        """The load of the engine less its warm requests."""
        if not self._in_engine or load.running is None or load.waiting is None:
            return load
        # Which of the two they count for is not known; most of their time they wait for blocks to be read.
        warm = len(self._in_engine)
        waiting = max(load.waiting - warm, 0)
        running = max(load.running - (warm - (load.waiting - waiting)), 0)
        return msgspec.structs.replace(load, running=running, waiting=waiting)

    async def run(self, work: Submit, until: float, submit: Callable[[], Awaitable[WarmOutcome]]) -> WarmOutcome:
        """Have `submit` (`pull` or `grow`) put a warm request to the engine, and wait until it has been computed, at
        most `until` (CLOCK_MONOTONIC). One that did not end is still to be cancelled in the engine."""
        warm = RequestEpoch(work.request_id, work.epoch)
        events = self._epoch_events.add(warm)
        try:
            outcome = await submit()
            if outcome.refused is None:
                async with asyncio.timeout(until - time.monotonic()):
                    await events.computed.wait()
        except (RequestError, EngineError) as error:
            return WarmOutcome(str(error))
        except TimeoutError:
            return WarmOutcome("the worker is too busy")
        else:
            return outcome
        finally:
            self._in_engine.discard(warm)
            self._epoch_events.forgotten([warm])
            await self._kv_puller.done([warm])

    async def pull(
        self, work: Submit, source: str, put: Callable[[Submit, PulledPrefix | None], Awaitable[None]]
    ) -> WarmOutcome:
        """Put a warm request to the engine by `put`, with the KV that `source` has of it, unless too much would have to
        be computed here."""
        pulled = await self._kv_puller.pull(work, source)
        refused = await self._refusal(work, pulled)
        if refused is not None:
            return WarmOutcome(refused)
        self._in_engine.add(RequestEpoch(work.request_id, work.epoch))
        await put(work, pulled)
        return WarmOutcome(pulled=pulled)

    async def grow(self, work: Submit, earlier: RequestEpoch) -> bool:
        """Put a warm request to the engine that grows from an earlier one. Returns False if it cannot."""
        warm = RequestEpoch(work.request_id, work.epoch)
        self._in_engine.add(warm)
        grown = await self._engine.grow(work, earlier, warm=True)
        if not grown:
            self._in_engine.discard(warm)
        return grown

    async def _refusal(self, work: Submit, pulled: PulledPrefix | None) -> str | None:
        """Why the warm request is not run, or None: too much of its context would have to be computed here."""
        if pulled is not None:
            lacking = len(pulled.hashes) - pulled.answer.blocks
        else:
            prefix = self._engine.prefix(work.token_ids, work.cache_salt, work.adapter)
            if prefix is None:
                return "the engine cannot pull KV"
            lacking = len(prefix.hashes) - await self._engine.cached(prefix)
        return "too little of its KV can be pulled from the source" if lacking > MAX_COMPUTED_BLOCKS else None
