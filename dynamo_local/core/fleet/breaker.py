"""Circuit breakers: workers that keep failing requests are avoided for a while. Pure.

Such workers are avoided, not ejected: routing takes them when there is no other worker, so that breakers never leave a
graph without workers. Only failures of the worker count, not those of a request (its parameters, its client), nor
refusals while draining. By default, 10 failures in 120 s open a breaker for 60 s, as gateways like Envoy do.
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
    """A breaker for each worker, by lease."""

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self._rule = rule or BreakerRule()
        self._failures: dict[str, deque[float]] = {}
        self._open_until: dict[str, float] = {}

    def failure(self, worker: str, now: float) -> None:
        """Count a request that the worker has failed."""
        times = self._failures.setdefault(worker, deque(maxlen=self._rule.failures))
        times.append(now)
        if len(times) == self._rule.failures and now - times[0] <= self._rule.window_s:
            self._open_until[worker] = now + self._rule.open_s
            times.clear()

    def open(self, now: float) -> tuple[str, ...]:
        """The workers to avoid now, ordered by lease."""
        self._open_until = {worker: until for worker, until in self._open_until.items() if until > now}
        return tuple(sorted(self._open_until))

    def forget(self, worker: str) -> None:
        """Drop the breaker of a worker that is gone."""
        self._failures.pop(worker, None)
        self._open_until.pop(worker, None)
