"""A breaker for each worker: one that keeps failing requests is avoided for a while. Pure.

Avoided, not ejected: routing takes an avoided worker when there is no other, so the breaker never ejects all. Only
failures of the worker count, never those of a request (its parameters, its client), nor a refusal while draining.
Figures: 10 failures in 120 s open it for 60 s, what Envoy-like gateways have settled on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class BreakerRule:
    """`failures` within `window_s` open the breaker for `open_s`."""

    failures: int = 10
    window_s: float = 120.0
    open_s: float = 60.0


class Breakers:
    """The breakers of all workers."""

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self._rule = rule or BreakerRule()
        self._failures: dict[str, deque[float]] = {}
        self._open_until: dict[str, float] = {}

    def failure(self, worker: str, now: float) -> None:
        """The worker failed a request."""
        times = self._failures.setdefault(worker, deque(maxlen=self._rule.failures))
        times.append(now)
        if len(times) == self._rule.failures and now - times[0] <= self._rule.window_s:
            self._open_until[worker] = now + self._rule.open_s
            times.clear()

    def open(self, now: float) -> tuple[str, ...]:
        """Workers to avoid now, in order of name."""
        self._open_until = {worker: until for worker, until in self._open_until.items() if until > now}
        return tuple(sorted(self._open_until))

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self._failures.pop(worker, None)
        self._open_until.pop(worker, None)
