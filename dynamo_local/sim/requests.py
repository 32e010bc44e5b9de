"""Requests of a simulated fleet: when they arrive, by a trace or otherwise, and what came of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.core.priority.fair_queue import Claim
from dynamo_local.core.routing.caches.index import KEY_BYTES, pack_hashes
from dynamo_local.engine.mocker.blocks import BlockHash
from dynamo_local.engine.mocker.sequence import Sequence
from dynamo_local.engine.mocker.tokens import Sampling

# Requests of a simulation, and their state in a simulated scheduler.

_LENGTH_ALONE = Sampling(max_tokens=None, ignore_eos=True)
_OWN = 1 << 63
"""Keys of blocks that nobody else has are above this; those of traces and workloads are below."""


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, in seconds, and its lengths in tokens. `keys` name the first full blocks of its
    context, prompt and output; the blocks behind them are nobody else's. `then`: the next one of its session, whose
    `at` counts from the end of this one."""

    number: int
    at: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()
    priority: int = 0
    key: str = ""
    then: Arrival | None = None

    def hashes(self, count: int) -> list[BlockHash]:
        """Hashes of the first `count` blocks of its context."""
        return [_hash(self._key(index)) for index in range(count)]

    def packed(self, block_tokens: int) -> bytes:
        """Keys of the prompt's blocks that can be cached, packed. The last token is in none."""
        return pack_hashes(self.hashes((self.prompt_tokens - 1) // block_tokens))

    def _key(self, index: int) -> int:
        return self.keys[index] if index < len(self.keys) else _OWN | self.number << 20 | index


def _hash(key: int) -> BlockHash:
    return key.to_bytes(KEY_BYTES, "little")


@dataclass(eq=False, slots=True)
class Counted(Sequence):
    """A request of which only lengths and the blocks' hashes are known. It is finished by its length alone."""

    counted: int = 0
    known: list[BlockHash] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.counted

    def hashes(self, count: int, block_size: int) -> list[BlockHash]:
        return self.known[:count]

    def draw(self, vocab_size: int, foreign: bytes | None = None) -> None:
        self.draw_all(1)

    def draw_all(self, count: int) -> None:
        """Draw that many tokens."""
        self.counted += count
        if self.counted >= self.end:
            self.finish = "length"


def counted(arrival: Arrival, now: float, block_size: int, context_limit: int) -> Counted:
    """State of a request that has just been submitted."""
    end = min(arrival.prompt_tokens + arrival.output_tokens, context_limit)
    return Counted(
        tokens=[],
        prompt_tokens=arrival.prompt_tokens,
        sampling=_LENGTH_ALONE,
        claim=Claim(arrival.priority, now, arrival.number, arrival.key),
        end=end,
        root=b"",
        state=0,
        counted=arrival.prompt_tokens,
        known=arrival.hashes(end // block_size),
    )


# Readers of public request traces.

BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's traces."""


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def mooncake(path: Path, speed: float = 1.0, most: int | None = None) -> list[Arrival]:
    """The requests of a trace in Mooncake's format, arriving `speed` times as fast; the first `most` of them.

    A hash id names a block of 512 tokens with all before it. The last one of a request names a part of a block, which
    is no full block of anybody. Raises UsageError.
    """
    try:
        rows = msgspec.json.Decoder(_Row).decode_lines(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} is no trace in Mooncake's format: {error}", "name a file of JSON lines") from error
    return [
        Arrival(
            number,
            row.timestamp / 1e3 / speed,
            row.input_length,
            max(row.output_length, 1),
            tuple(row.hash_ids[: row.input_length // BLOCK_TOKENS]),
        )
        for number, row in enumerate(rows[:most])
    ]


# What came of the requests of a simulation.


@dataclass(slots=True)
class Served:
    """A request and what came of it. Times in seconds, nan until they are known; counts in tokens."""

    arrival: Arrival
    at: float
    """When it came."""
    worker: str = ""
    first_token_at: float = math.nan
    """When its client had it, as `ended_at`."""
    ended_at: float = math.nan
    cached: int = 0
    """Found in the worker's cache when it was first admitted, and not pulled."""
    pulled: int = 0
    predicted: int = 0
    """What the router took for cached at the worker."""
    preempted: int = 0
    drawn: int = 0
    moved: int = 0
    longest_gap_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.at


@dataclass
class Gaps:
    """Gaps between the tokens of requests, weighted: seconds to number."""

    counts: Counter[float] = field(default_factory=Counter)

    def add(self, gap_s: float, number: int) -> None:
        self.counts[gap_s] += number

    def percentiles(self, shares: Seq[float]) -> list[float]:
        """The smallest gaps that are at least as long as those shares (rising) of all. nan if there are none."""
        wanted, found, seen = [share * self.total for share in shares], [math.nan] * len(shares), 0
        index = 0
        for gap, number in sorted(self.counts.items()):
            seen += number
            while index < len(wanted) and seen >= wanted[index]:
                found[index] = gap
                index += 1
        return found

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def mean(self) -> float:
        return sum(gap * number for gap, number in self.counts.items()) / self.total if self.total else math.nan


@dataclass(frozen=True)
class Figures:
    """Figures of a run, or of a part of its requests. Times in seconds."""

    requests: int
    reused: float
    """Share of prompt tokens that were found in caches when requests were first admitted."""
    pulled: float
    """Share of prompt tokens that were pulled from other workers."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    itl_mean_s: float
    itl_p99_s: float
    output_tokens_per_s: float
    preemptions: int


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that is at least as large as that share of all. nan if there are none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan


def figures(served: Seq[Served], gaps: Gaps) -> Figures:
    """Sum up requests, all of which have ended."""
    prompt = sum(each.arrival.prompt_tokens for each in served)
    ttfts = [each.ttft_s for each in served]
    span = max(each.ended_at for each in served) - min(each.at for each in served)
    mean_itl, (p99_itl,) = gaps.mean, gaps.percentiles([0.99])
    return Figures(
        requests=len(served),
        reused=sum(each.cached for each in served) / prompt,
        pulled=sum(each.pulled for each in served) / prompt,
        ttft_mean_s=sum(ttfts) / len(ttfts),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p90_s=percentile(ttfts, 0.9),
        ttft_p99_s=percentile(ttfts, 0.99),
        itl_mean_s=mean_itl,
        itl_p99_s=p99_itl,
        output_tokens_per_s=sum(each.drawn for each in served) / span,
        preemptions=sum(each.preempted for each in served),
    )
