"""Computes the figures of a run from its records."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from dynamo_local.load.results.objectives import Objective
from dynamo_local.load.results.quantiles import Spread, spread
from dynamo_local.load.results.records import CUT_OFF, Record


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
