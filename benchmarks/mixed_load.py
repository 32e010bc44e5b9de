"""Streams that decode all the time while long prompts arrive: the load of the benchmark of disaggregation."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass

from benchmarks.accounting import Usage, usage
from benchmarks.presences import PresenceLog
from benchmarks.servers import Server
from benchmarks.spread import quantile
from dynamo_local.core.messages import TokenBatch
from dynamo_local.load.arrivals import Constant
from dynamo_local.load.endpoint import Asking, parse_url
from dynamo_local.load.figures import figures
from dynamo_local.load.generator import Generator, Limits, Writer
from dynamo_local.load.lengths import Uniform
from dynamo_local.load.prompts import Alphabet, Prompts
from dynamo_local.load.records import Record
from dynamo_local.load.workload import Lengthwise, drawn, endless

LONG_ANSWER = 16
"""Tokens. The answers of the streams are longer."""
_SETTLE_S = 1.0
_LETTERS = range(32, 127)
"""Tokens of the quick-start tokenizer that are printable text: half a character would wait for its other half."""
_LIMITS = Limits(max_in_flight=1000, timeout_s=120.0)


@dataclass(frozen=True)
class Traffic:
    """What is asked."""

    streams: int
    stream_shape: Lengthwise
    long_tokens: int
    every_s: float
    """From one long prompt to the next."""


@dataclass(frozen=True)
class Turn:
    """What one turn brought."""

    decodes: tuple[Record, ...]
    longs: tuple[Record, ...]
    used: Usage
    arrivals_s: float
    """Until then long prompts arrived."""
    engine_gaps_s: tuple[float, ...] = ()
    """From one token of a stream to its next, as they left the engines."""

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
        """Of all answers."""
        return figures((*self.decodes, *self.longs), 0.0, 0.0).output_tokens_per_s

    @property
    def tokens_per_chunk(self) -> float:
        return figures(self.decodes, 0.0, 0.0).tokens_per_chunk or 0.0

    @property
    def failures(self) -> list[str]:
        return [f"{record.error}: {record.detail}" for record in (*self.decodes, *self.longs) if record.error]

    def gap_s(self, share: float) -> float:
        return quantile(self.gaps_s, share)

    def engine_gap_s(self, share: float) -> float | None:
        return quantile(self.engine_gaps_s, share) if self.engine_gaps_s else None


class EngineTimes:
    """When the engines of a server had the tokens of its requests, by the times that their workers tell."""

    def __init__(self) -> None:
        self._times: defaultdict[str, list[float]] = defaultdict(list)

    async def follow(self, log: PresenceLog) -> None:
        await log.watch_tokens(self.take)

    def take(self, batch: TokenBatch) -> None:
        for delta in batch.deltas:
            if delta.token_ids:
                self._times[delta.request_id].append(batch.timestamp)

    def gaps_s(self, seconds: float) -> tuple[float, ...]:
        """Of the streams' requests in the first `seconds` of what was seen since the last call."""
        seen, self._times = self._times, defaultdict(list)
        end = min((times[0] for times in seen.values()), default=0.0) + seconds
        streams = [times for times in seen.values() if len(times) > LONG_ANSWER]
        return tuple(b - a for times in streams for a, b in itertools.pairwise(times) if b <= end)


async def mixed_load(
    server: Server, traffic: Traffic, seconds: float, seed: int, engine_times: EngineTimes | None = None
) -> Turn:
    """Streams that decode from the first second to the last (closed loop), and a long prompt at steady intervals,
    whether or not the earlier ones were answered (open loop)."""
    endpoint = parse_url(f"http://{server.host}:{server.port}")
    connections = endpoint.connections()
    asking = Asking(server.model, is_chat=False, ignore_eos=True, extra={})
    long_shape = Lengthwise(Uniform(traffic.long_tokens, traffic.long_tokens), Uniform(LONG_ANSWER, LONG_ANSWER))

    def generator(prompts_seed: int) -> Generator:
        prompts = Prompts(Alphabet(_LETTERS, 0), prompts_seed)
        return Generator(connections, Writer(endpoint, asking, prompts), _LIMITS)

    decodes, longs = generator(2 * seed), generator(2 * seed + 1)
    before = usage(server.processes)
    try:
        await asyncio.gather(
            decodes.closed_loop(endless(traffic.stream_shape, seed), traffic.streams, seconds),
            longs.open_loop(drawn(Constant(1 / traffic.every_s), long_shape, seconds, seed)),
        )
    finally:
        connections.close()
    used = usage(server.processes).since(before)
    await asyncio.sleep(_SETTLE_S)
    gaps_s = engine_times.gaps_s(seconds) if engine_times is not None else ()
    return Turn(tuple(decodes.records), tuple(longs.records), used, seconds, gaps_s)
