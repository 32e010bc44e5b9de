"""Streams that decode all the time while long prompts arrive: the load of the benchmark of disaggregation."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.harness.accounting import Usage, usage
from benchmarks.harness.generated import client_of, generator_of
from benchmarks.harness.presences import PresenceLog
from benchmarks.harness.servers import Server
from benchmarks.harness.spread import quantile
from dynamo_local.core.messages.work import TokenBatch
from dynamo_local.load.figures import Record
from dynamo_local.load.workload import Constant, Lengthwise, Uniform, drawn, endless

LONG_ANSWER = 16
"""Tokens. The answers of the streams are longer."""
_SETTLE_S = 1.0


@dataclass(frozen=True)
class Traffic:
    """What is asked."""

    streams: int
    stream_shape: Lengthwise
    long_tokens: int
    every_s: float
    """From one long prompt to the next."""


@dataclass(frozen=True)
class EngineView:
    """What left the engines during one turn."""

    gaps_s: tuple[float, ...] = ()
    """From one token of a stream to its next."""
    tokens: int = 0
    """Of streams and long prompts."""
    stream_tokens: int = 0


@dataclass(frozen=True)
class Turn:
    """What one turn brought."""

    decodes: tuple[Record, ...]
    longs: tuple[Record, ...]
    used: Usage
    arrivals_s: float
    """Until then long prompts arrived, and streams went on."""
    engines: EngineView = field(default_factory=EngineView)

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latency of the streams that decode: each silence between two chunks."""
        return [
            later - earlier
            for record in self.decodes
            for earlier, later in itertools.pairwise(record.chunks_s)
            if later <= self.arrivals_s
        ]

    @property
    def ttfts_s(self) -> list[float]:
        """Of the long prompts."""
        return [record.ttft_s for record in self.longs if record.ttft_s is not None]

    @property
    def tokens_per_s(self) -> float:
        return self.engines.tokens / self.arrivals_s

    @property
    def tokens_per_chunk(self) -> float:
        """Of the streams."""
        chunks = sum(at <= self.arrivals_s for record in self.decodes for at in record.chunks_s)
        return self.engines.stream_tokens / chunks if chunks else 0.0

    @property
    def failures(self) -> list[str]:
        return [record.failure for record in (*self.decodes, *self.longs) if record.is_failed]

    def gap_s(self, share: float) -> float:
        return quantile(self.gaps_s, share)

    def engine_gap_s(self, share: float) -> float | None:
        return quantile(self.engines.gaps_s, share) if self.engines.gaps_s else None


class EngineTimes:
    """When the engines of a server had the tokens of its requests, by when they came from there."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        """By request: when how many tokens left its engine."""

    async def follow(self, log: PresenceLog) -> None:
        await log.watch_tokens(lambda batch: self.take(batch, time.monotonic()))

    def take(self, batch: TokenBatch, at: float) -> None:
        for delta in batch.deltas:
            if delta.token_ids:
                self._seen[delta.request_id].append((at, len(delta.token_ids)))

    def view(self, seconds: float) -> EngineView:
        """The first `seconds` of what was seen since the last call."""
        seen, self._seen = self._seen, defaultdict(list)
        end = min((times[0][0] for times in seen.values()), default=0.0) + seconds
        in_time = [[(at, tokens) for at, tokens in times if at <= end] for times in seen.values()]
        streams = [times for times in in_time if len(times) > LONG_ANSWER]
        return EngineView(
            tuple(later - earlier for times in streams for (earlier, _), (later, _) in itertools.pairwise(times)),
            sum(tokens for times in in_time for _, tokens in times),
            sum(tokens for times in streams for _, tokens in times),
        )


async def mixed_load(server: Server, traffic: Traffic, seconds: float, seed: int, engine_times: EngineTimes) -> Turn:
    """Streams that decode from the first second to the last, when they are cut off (closed loop), and a long prompt at
    steady intervals, whether or not the earlier ones were answered (open loop)."""
    client = client_of(server)
    decodes, longs = generator_of(client, 2 * seed), generator_of(client, 2 * seed + 1)
    long_shape = Lengthwise(Uniform(traffic.long_tokens, traffic.long_tokens), Uniform(LONG_ANSWER, LONG_ANSWER))

    async def decode() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await decodes.closed_loop(endless(traffic.stream_shape, seed), traffic.streams, None)

    before = usage(server.processes)
    async with client:
        await asyncio.gather(
            decode(),
            longs.open_loop(drawn(Constant(1 / traffic.every_s), long_shape, seconds, seed)),
        )
    used = usage(server.processes).since(before)
    await asyncio.sleep(_SETTLE_S)
    return Turn(tuple(decodes.records), tuple(longs.records), used, seconds, engine_times.view(seconds))
