"""What workers tell of themselves: how old it is, and how fast their engines are. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap

from dynamo_local.core.messages.presence import EngineRates, Load
from dynamo_local.core.priority.classes import PriorityClass

# Validates the load that a worker reports: complete, finite and recent, or unknown. Pure.

STALE_S = 10.0
"""A load older than this is unknown: the engine may hang. Longer than any sensible engine step."""


@dataclass(frozen=True)
class Reading:
    """A valid load. `kv_usage`: share of KV blocks that requests use, 0 to 1, without blocks only pinned for readers.
    `age_s`: time since the measurement. `head_tokens`: see Load, `prefill_s`: see Counts; None is unknown.
    `head_age_s`: for how long the first waiting request has been that. `urgent`: running requests of the class high, as
    far as the worker tells."""

    running: int
    waiting: int
    kv_usage: float
    age_s: float
    head_tokens: int | None = None
    prefill_s: float | None = None
    head_age_s: float | None = None
    urgent: int = 0


def reading_of(load: Load | None, now: float, prefill_s: float | None = None) -> Reading | None:
    """A load as a reading; None if a part is missing, or it is stale. `prefill_s` comes from the same presence."""
    if load is None or load.running is None or load.waiting is None or load.kv_usage is None or load.at is None:
        return None
    if not (math.isfinite(load.kv_usage) and math.isfinite(load.at)):
        # Every comparison with NaN is false: one such value would silently stop all scaling.
        return None
    age_s = max(0.0, now - load.at)
    if age_s > STALE_S:
        return None
    # Some engines report no head_tokens when no request waits; then it is known to be 0.
    head_tokens = 0 if load.waiting == 0 else load.head_tokens
    head_age_s = None if load.head_since is None else max(0.0, now - load.head_since)
    urgent = sum(each.requests for each in load.by_class or () if each.priority_class == PriorityClass.HIGH)
    return Reading(load.running, load.waiting, load.kv_usage, age_s, head_tokens, prefill_s, head_age_s, urgent)


# How fast engines are: measured from the steps of one, and compared among workers. Pure.

ASSUMED = EngineRates(prefill_s_per_token=1e-4, step_s=0.02, step_s_per_running=1e-4, held_s=5.0)
"""Rates of a fleet in which nothing was measured. Places count as held for long, so that no request waits for one while
another worker has one."""

_STEPS, _REQUESTS = 500.0, 50.0
"""Number of later observations after which one counts 1/e."""

_FEW_PROMPTS, _FEW_TOKENS = 5.0, 2048.0
"""Number of prompts, and of their tokens, from which no rate is told. First prompts take longer, and short ones are
steps mostly: a worker would count as slow by chance, and get none by which it could measure again."""

_ALIKE = 2.5
"""Workers whose rates differ by less than this factor count as equally fast: measurements differ by chance, and one of
many idle workers is not to get all requests for that."""


class _Line:
    """Least squares of y = intercept + slope * x, both at least 0. Older observations count less."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._sums = [0.0] * 5
        """Weighted sums of 1, x, y, x * x and x * y."""

    def add(self, x: float, y: float, number: float = 1.0) -> None:
        """Enter an observation, made `number` times."""
        kept = math.exp(-number / self._memory)
        new = (number, number * x, number * y, number * x * x, number * x * y)
        self._sums = [kept * old + more for old, more in zip(self._sums, new, strict=True)]

    @property
    def observed(self) -> tuple[float, float]:
        """Number of observations, and the sum of their x, older ones in part."""
        return self._sums[0], self._sums[1]

    def fit(self, *, at_zero: float | None = None) -> tuple[float, float] | None:
        """Intercept and slope; None without an observation. The slope is 0 if all x are the same, unless it is known
        that y is about `at_zero` for an x of 0."""
        n, x, y, xx, xy = self._sums
        if n == 0:
            return None
        if at_zero is not None:
            n, y = n + 1, y + at_zero
        # The last part is a variance of 1 more: of x that hardly differ, chance alone would make a steep line.
        spread = n * xx - x * x + n * n
        slope = max((n * xy - x * y) / spread, 0.0)
        slope = min(slope, y / x) if x else 0.0
        return (y - slope * x) / n, slope


class RateMeter:
    """Measures an engine. Times are in seconds, moments those of one clock."""

    def __init__(self) -> None:
        self._steps = _Line(_STEPS)
        self._prompts = _Line(_REQUESTS)
        self._held = _Line(_REQUESTS)
        self._begun_until = -math.inf

    def decoded(self, step_s: float, running: int, steps: int = 1) -> None:
        """Note steps in which that many requests decoded, and no prompt was computed."""
        self._steps.add(running, step_s, steps)

    def begun(self, now: float, requests: Collection[tuple[float, int]]) -> None:
        """Note the first tokens that came at `now`: of each, when the request was admitted, and how many tokens it had
        to compute. Time that another request's prompt took before is not counted again."""
        if requests:
            since = max(min(admitted_at for admitted_at, _ in requests), self._begun_until)
            self._prompts.add(sum(tokens for _, tokens in requests), now - since)
            self._begun_until = now

    def ended(self, held_s: float) -> None:
        """Note a request that has run for that long."""
        self._held.add(0.0, held_s)

    @property
    def rates(self) -> EngineRates | None:
        """What was measured; None: nothing yet."""
        steps, held = self._steps.fit(), self._held.fit()
        number, tokens = self._prompts.observed
        prompts = None
        if number > _FEW_PROMPTS and tokens > _FEW_TOKENS:
            prompts = self._prompts.fit(at_zero=0.0 if steps is None else steps[0])
        if steps is None and prompts is None and held is None:
            return None
        return EngineRates(
            prefill_s_per_token=None if prompts is None else _rounded(prompts[1]),
            step_s=None if steps is None else _rounded(steps[0]),
            step_s_per_running=None if steps is None else _rounded(steps[1]),
            held_s=None if held is None else _rounded(held[0]),
        )


def compared(rates: Sequence[EngineRates | None]) -> list[EngineRates]:
    """Return the rates of all workers without gaps: what a worker has not measured, or about as its fleet, is typical.

    The order of the workers makes no difference.
    """
    return list(_compared(tuple(rates)))


@lru_cache(maxsize=64)
def _compared(rates: tuple[EngineRates | None, ...]) -> tuple[EngineRates, ...]:
    """Kept: workers tell other rates twice a second at most, and are asked for more often."""
    known = [EngineRates() if each is None else each for each in rates]
    names = EngineRates.__struct_fields__
    columns = [[getattr(each, name) for each in known] for name in names]
    filled = starmap(_filled, zip(columns, (getattr(ASSUMED, name) for name in names), strict=True))
    return tuple(starmap(EngineRates, zip(*filled, strict=True)))


def _filled(column: list[float | None], assumed: float) -> list[float]:
    measured = sorted(value for value in column if value is not None)
    typical = measured[len(measured) // 2] if measured else assumed
    return [typical if value is None or _are_alike(value, typical) else value for value in column]


def _are_alike(one: float, other: float) -> bool:
    return one <= other * _ALIKE and other <= one * _ALIKE


def _rounded(value: float) -> float:
    """Three digits: presences that differ by less are the same."""
    return float(f"{value:.3g}")
