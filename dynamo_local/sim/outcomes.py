"""What came of the requests of a simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dynamo_local.sim.requests import Arrival


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

    def percentiles(self, shares: Sequence[float]) -> list[float]:
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


def figures(served: Sequence[Served], gaps: Gaps) -> Figures:
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
