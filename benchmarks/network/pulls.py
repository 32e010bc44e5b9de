"""How long a worker takes to the first token of a prompt whose KV another one has, asked over the bus as a frontend
asks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from benchmarks.harness.servers import ServerError
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.work import Cancel, RequestEpoch, Submit, TokenBatch
from dynamo_local.core.subjects import Subjects

_FRONTEND = "benchmark"
_PATIENCE_S = 120.0


@dataclass
class _Asked:
    first: asyncio.Future[float]
    """Time of the first token."""
    cached: int = 0


@dataclass
class Asker:
    """Stands for a frontend."""

    bus: Bus
    subjects: Subjects
    _asked: dict[str, _Asked] = field(default_factory=dict)

    async def start(self) -> None:
        await self.bus.listen(self.subjects.tokens(_FRONTEND), TokenBatch, self._hear)
        await self.bus.flush()

    async def first_token(self, worker: str, prompt: list[int], source: str | None = None) -> tuple[float, int]:
        """Have a worker, by its lease, answer with a single token. Returns the seconds that it took, and how many
        tokens were not computed."""
        name = f"bench-{len(self._asked)}"
        asked = self._asked[name] = _Asked(asyncio.get_running_loop().create_future())
        sampling = msgspec.msgpack.encode({"max_tokens": 1, "temperature": 0.0, "ignore_eos": True})
        work = Submit(name, 1, _FRONTEND, prompt, msgspec.Raw(sampling), source=source)
        begun = time.monotonic()
        await self.bus.send(self.subjects.work(worker), work)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                took_s = await asked.first - begun
        except TimeoutError as error:
            raise ServerError(f"worker {worker} did not answer within {_PATIENCE_S:g} s") from error
        # It keeps the token otherwise, to send it again.
        await self.bus.send(self.subjects.work(worker), Cancel((RequestEpoch(name, 1),)))
        return took_s, asked.cached

    async def _hear(self, batch: TokenBatch) -> None:
        now = time.monotonic()
        for delta in batch.deltas:
            asked = self._asked[delta.request_id]
            if delta.token_ids and not asked.first.done():
                asked.cached = delta.cached_tokens or 0
                asked.first.set_result(now)
