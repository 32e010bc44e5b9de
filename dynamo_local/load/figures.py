"""What a load has come to: the record of each request, and the figures that follow from all of them, with objectives,
and with notes that qualify them. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.load.quantities import parse_duration, shown_duration

# The record of a request: its times and tokens, and the latencies that follow from them.

NOT_SENT = "not sent"
CUT_OFF = "cut off"


class Record(msgspec.Struct):
    """The record of a request. Times are seconds since the start of the load."""

    at_s: float
    """Planned time of sending."""
    input_tokens: int
    """Length of the prompt; in words if prompts are text."""
    output_tokens: int
    """Requested length of the answer."""
    sent_s: float | None = None
    """Time of sending, before a new connection is set up; None if the request was not sent."""
    chunks_s: list[float] = msgspec.field(default_factory=list)
    """Time of arrival of each chunk with tokens. A chunk may have several tokens."""
    ended_s: float | None = None
    """Time at which the answer was complete, or failed."""
    tokens: int = 0
    """Length of the answer by the server's count, or else the number of chunks."""
    prompt_tokens: int | None = None
    """Length of the prompt by the server's count, if there is one."""
    error: str = ""
    """Kind of the failure; empty if there was none."""
    detail: str = ""
    """The failure in words."""

    @property
    def failure(self) -> str:
        """The kind of the failure and the failure in words; empty if there was none."""
        return f"{self.error}: {self.detail}" if self.error else ""

    @property
    def is_completed(self) -> bool:
        return self.ended_s is not None and not self.error

    @property
    def is_failed(self) -> bool:
        return bool(self.error) and self.error != CUT_OFF

    @property
    def lag_s(self) -> float | None:
        """Delay of the sending against its plan, caused by the generator and not by the server."""
        return None if self.sent_s is None else self.sent_s - self.at_s

    @property
    def ttft_s(self) -> float | None:
        """Time from the sending to the first token."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s and self.sent_s is not None else None

    @property
    def e2e_s(self) -> float | None:
        """Time from the sending to the end of the answer."""
        return None if self.ended_s is None or self.sent_s is None else self.ended_s - self.sent_s

    @property
    def itl_s(self) -> float | None:
        """Mean time from token to token of this answer; None with fewer than two tokens."""
        if self.tokens < 2 or not self.chunks_s:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive chunks, as a reader of the stream sees them."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks_s)]


class Completion(Record):
    """A completion whose token ids are kept, if the server returns them (`return_token_ids`)."""

    # Not planned: known when it is sent.
    at_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)


# Quantiles, and confidence intervals of ratios of quantiles.

RESAMPLES = 2000
CONFIDENCE = 0.95
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Spread(msgspec.Struct, frozen=True):
    """Mean, quantiles and maximum of a set of values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Interval(msgspec.Struct, frozen=True):
    """An estimate, and its confidence interval at level `CONFIDENCE`."""

    low: float
    estimate: float
    high: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile at `share` (0 to 1) of ascending values, interpolated. Raises ValueError without values."""
    if not ordered:
        raise ValueError("no values, no quantile")
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of the values; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    # fsum rounds once, but the quotient may leave the range of the values by the last bit.
    within = min(max(mean, ordered[0]), ordered[-1])
    quantiles = {name: quantile(ordered, share) for name, share in SHARES.items()}
    return Spread(count=len(ordered), mean=within, max=ordered[-1], **quantiles)


def resampled(ordered: Sequence[float], share: float, draw: random.Random) -> float:
    """Return a bootstrap replicate of a quantile: the quantile of a resample of the values with replacement.

    No resample is drawn: the k-th smallest of n uniform numbers has the distribution Beta(k, n + 1 - k) (David and
    Nagaraja, Order Statistics, section 2.3), and so has the relative rank of the k-th smallest value of a resample.
    """
    size = len(ordered)
    place = max(1, math.ceil(share * size))
    rank = draw.betavariate(place, size + 1 - place)
    return ordered[min(int(rank * size), size - 1)]


def ratio_of_quantiles(
    first: Sequence[float], second: Sequence[float], share: float, draw: random.Random
) -> Interval | None:
    """Return the ratio of the second sample's quantile to the first's, with a percentile bootstrap interval (Efron and
    Tibshirani, An Introduction to the Bootstrap, chapter 13). None if a sample is empty, or if quantiles of the
    first are 0.

    The values are taken as independent. Latencies of requests that queued behind each other are not: then the interval
    is too narrow.
    """
    first, second = sorted(first), sorted(second)
    if not first or not second or not quantile(first, share) > 0:
        return None
    pairs = ((resampled(second, share, draw), resampled(first, share, draw)) for _ in range(RESAMPLES))
    ratios = sorted(above / below if below > 0 else math.inf for above, below in pairs)
    tail = (1 - CONFIDENCE) / 2
    estimate = quantile(second, share) / quantile(first, share)
    # Whole ranks only: interpolation towards infinity gives NaN.
    return Interval(ratios[int(tail * (RESAMPLES - 1))], estimate, ratios[math.ceil((1 - tail) * (RESAMPLES - 1))])


# Service level objectives: limits of an answer's latencies.


def _longest_gap(record: Record) -> float | None:
    return max(record.gaps_s, default=None)


_MEASURES: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft_s,
    "itl": lambda record: record.itl_s,
    "gap": _longest_gap,
    "e2e": lambda record: record.e2e_s,
}
OBJECTIVE_SYNTAX = "ttft=500ms,itl=50ms; also gap (longest silence between two chunks) and e2e"


@dataclass(frozen=True)
class Objective:
    """Limits of latencies that an answer must keep. `limits_s`: pairs of a latency's name and its limit in seconds."""

    limits_s: tuple[tuple[str, float], ...]

    def missed(self, record: Record) -> tuple[str, ...]:
        """Return the limits that a completed request did not keep. A limit on a latency that the request does not have
        (gaps of an answer with one token) counts as kept, but a missing first token does not."""
        values = ((name, limit_s, _MEASURES[name](record)) for name, limit_s in self.limits_s)
        return tuple(
            name for name, limit_s, value in values if (value > limit_s if value is not None else name == "ttft")
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {shown_duration(limit_s)}" for name, limit_s in self.limits_s)


def parse_objective(text: str) -> Objective:
    """Parse an objective such as `ttft=500ms,itl=50ms`. Raises UsageError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, limit = (piece.strip() for piece in part.partition("="))
        if name not in _MEASURES or not equals or name in limits:
            raise UsageError(f"{part.strip()!r} is not an objective", f"write {OBJECTIVE_SYNTAX}")
        limits[name] = parse_duration(limit)
    return Objective(tuple(limits.items()))


# Computes the figures of a run from its records.


class Goodput(msgspec.Struct, frozen=True):
    """Goodput: the requests that kept the objective."""

    objective: str
    good: int
    share: float
    """Share of all planned requests, 0 to 1. Failed requests count as not good; cut-off ones are left out."""
    per_s: float
    missed: dict[str, int]
    """Number of completed requests that exceeded a limit, by limit."""


class Figures(msgspec.Struct, frozen=True):
    """Figures of the requests planned after the warm-up. Latencies are those of completed requests, in seconds."""

    planned: int
    completed: int
    failed: int
    cut_off: int
    """Number of requests in flight when the load was interrupted. No other figure counts them."""
    errors: dict[str, int]
    most_at_once: int
    arrivals_s: float
    """Time for which requests were sent after the warm-up."""
    wall_s: float
    """Time from the end of the warm-up to the end of the last answer or of the sending, whichever is later."""
    offered_per_s: float
    """Planned requests per second of `arrivals_s`."""
    completed_per_s: float
    """Completed requests per second of `wall_s`, to which the rates of tokens refer too."""
    input_tokens_per_s: float
    output_tokens_per_s: float
    tokens_per_chunk: float | None
    ttft_s: Spread | None
    itl_s: Spread | None
    gap_s: Spread | None
    e2e_s: Spread | None
    lag_s: Spread | None
    """Lag of all requests that were sent."""
    goodput: Goodput | None = None


def figures(
    records: Sequence[Record], begin_s: float, arrivals_end_s: float, objective: Objective | None = None
) -> Figures:
    """Compute the figures of the requests planned from `begin_s` on. Sending ended at `arrivals_end_s`."""
    counted = [record for record in records if record.at_s >= begin_s]
    completed = [record for record in counted if record.is_completed]
    arrivals_s = max(arrivals_end_s - begin_s, 0.0)
    wall_s = max((record.ended_s - begin_s for record in counted if record.ended_s is not None), default=0.0)
    wall_s = max(wall_s, arrivals_s)
    chunks = sum(len(record.chunks_s) for record in completed)
    tokens = sum(record.tokens for record in completed)
    return Figures(
        planned=len(counted),
        completed=len(completed),
        failed=sum(record.is_failed for record in counted),
        cut_off=sum(record.error == CUT_OFF for record in counted),
        errors=dict(Counter(record.error for record in counted if record.is_failed).most_common()),
        most_at_once=most_at_once(counted),
        arrivals_s=arrivals_s,
        wall_s=wall_s,
        offered_per_s=_per(len(counted), arrivals_s),
        completed_per_s=_per(len(completed), wall_s),
        input_tokens_per_s=_per(sum(_prompt_tokens(record) for record in completed), wall_s),
        output_tokens_per_s=_per(tokens, wall_s),
        tokens_per_chunk=tokens / chunks if chunks else None,
        ttft_s=_spread(record.ttft_s for record in completed),
        itl_s=_spread(record.itl_s for record in completed),
        gap_s=spread(list(itertools.chain.from_iterable(record.gaps_s for record in completed))),
        e2e_s=_spread(record.e2e_s for record in completed),
        lag_s=_spread(record.lag_s for record in counted),
        goodput=None if objective is None else goodput(counted, objective, wall_s),
    )


def goodput(counted: Sequence[Record], objective: Objective, wall_s: float) -> Goodput:
    """Compute the goodput. Failed requests are not good, whatever the cause."""
    judged = [record for record in counted if record.error != CUT_OFF]
    misses = [objective.missed(record) for record in judged if record.is_completed]
    good = sum(not missed for missed in misses)
    return Goodput(
        objective=str(objective),
        good=good,
        share=good / len(judged) if judged else 0.0,
        per_s=_per(good, wall_s),
        missed=dict(Counter(itertools.chain.from_iterable(misses))),
    )


def most_at_once(records: Iterable[Record]) -> int:
    """Return the maximum number of requests in flight at a time."""
    spans = [(record.sent_s, record.ended_s) for record in records if record.sent_s is not None]
    # At the same instant ends sort before begins: a request that follows another one does not overlap it.
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans if end is not None])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def _prompt_tokens(record: Record) -> int:
    return record.input_tokens if record.prompt_tokens is None else record.prompt_tokens


def _spread(values: Iterable[float | None]) -> Spread | None:
    return spread([value for value in values if value is not None])


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


# Notes on a run: sentences that qualify its figures.

_LATE_S = 0.020
_BUSY_SHARE = 0.8
_FEW = 200
_OFF_SHARE = 0.01
_UNDER_WAY_SHARE = 0.2


def notes(figures: Figures, records: Sequence[Record], client_cpu_share: float, *, is_closed: bool) -> list[str]:
    """Return the notes on these figures, the most important first. `records`: the requests after the warm-up."""
    completed = [record for record in records if record.is_completed]
    found = [*_about_the_generator(figures, client_cpu_share), *_about_the_answers(completed, figures)]
    if not is_closed:
        found += _about_the_load(figures, records)
    if 0 < figures.completed < _FEW:
        found.append(f"with {figures.completed} answers p99 says little more than the slowest one")
    return found


def _about_the_generator(figures: Figures, client_cpu_share: float) -> Iterator[str]:
    if not_sent := figures.errors.get(NOT_SENT):
        yield (
            f"{not_sent} requests were not sent, because --max-in-flight requests were in flight; they count as failed"
        )
    lag = figures.lag_s
    if lag is not None and lag.p99 > _LATE_S:
        yield (
            f"the generator was late: p99 {lag.p99 * 1e3:.0f} ms, at most {lag.max * 1e3:.0f} ms; arrivals differ "
            "from the plan, and answers may have been read late too"
        )
    if client_cpu_share > _BUSY_SHARE:
        yield (
            f"the generator used {client_cpu_share:.0%} of a core: latencies are partly its own; use a lower rate or "
            "several generators"
        )


def _about_the_load(figures: Figures, records: Sequence[Record]) -> Iterator[str]:
    end_s = max((record.at_s for record in records), default=0.0)
    under_way = sum(
        record.sent_s is not None and (record.ended_s is None or record.ended_s > end_s) for record in records
    )
    if figures.planned >= 20 and under_way > _UNDER_WAY_SHARE * figures.planned:
        yield (
            f"{under_way} of {figures.planned} requests were still in flight when the last one was sent: the server "
            "cannot keep up or the load was too short, and the latencies depend on its duration"
        )


def _about_the_answers(completed: Sequence[Record], figures: Figures) -> Iterator[str]:
    other = sum(record.tokens != record.output_tokens for record in completed)
    if other > _OFF_SHARE * len(completed):
        yield f"{other} of {len(completed)} answers do not have the requested number of tokens"
    counted = [(record.prompt_tokens, record.input_tokens) for record in completed if record.prompt_tokens is not None]
    if len(counted) < len(completed):
        yield "the server did not count tokens: each chunk counts as one"
    there, asked = sum(there for there, _ in counted), sum(asked for _, asked in counted)
    if asked and abs(there / asked - 1) > _OFF_SHARE:
        yield f"the server counted {there / asked:.2f} times the prompt tokens that were requested"
    if figures.tokens_per_chunk is not None and figures.tokens_per_chunk > 1 + _OFF_SHARE:
        yield f"chunks held {figures.tokens_per_chunk:.2f} tokens on average: gaps are between chunks, not tokens"
