"""Tells which workers thrash: take KV from running requests again and again, and compute it anew. Pure.

One preemption is no spiral: a request that was preempted once may find room when the next one ends. So a worker begins
to thrash with the second sign within `CALM_S`, and does until it has shown none for as long. Signs are requests that
wait although they have run, and contexts given up since the last look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from dynamo_local.core.fleet.readings import reading_of
from dynamo_local.core.messages.presence import Load, Presence

CALM_S = 5.0
"""Some hundred decode steps: what a worker without room for the growth of its requests does not pass quietly."""

_ONE_MEASUREMENT_S = 0.1
"""Moments of one measurement that is told twice differ by less: a load has an age, and messages travel for more or less
time (core/messages/presence.py)."""


@dataclass(frozen=True)
class PreemptionSigns:
    """What was last seen of a worker. `measured_at`: when its load was measured; `seen_at`: time of the last sign, None
    before the first. Times are CLOCK_MONOTONIC, in seconds."""

    measured_at: float
    recomputed_tokens: int | None
    seen_at: float | None = None
    thrashing: bool = False


class ThrashWatch:
    """Follows the loads that workers report."""

    def __init__(self) -> None:
        self._signs: dict[str, PreemptionSigns] = {}

    def look(self, workers: Iterable[Presence], now: float) -> Collection[str]:
        """Return the leases of workers that thrash. What is known of a worker is forgotten with its load."""
        loads = {worker.lease: worker.load for worker in workers if reading_of(worker.load, now) is not None}
        self._signs = {
            lease: signs_after(self._signs.get(lease), load, now) for lease, load in loads.items() if load is not None
        }
        return {lease for lease, signs in self._signs.items() if signs.thrashing}


def signs_after(known: PreemptionSigns | None, load: Load, now: float) -> PreemptionSigns:
    """Return what is known of a worker after this load, which must have been measured."""
    assert load.at is not None
    if known is None:
        known = PreemptionSigns(load.at - 1.0, load.recomputed_tokens)
    recent = known.seen_at is not None and now - known.seen_at <= CALM_S
    if load.at <= known.measured_at + _ONE_MEASUREMENT_S:
        return replace(known, thrashing=known.thrashing and recent)
    if _is_sign(known, load):
        return PreemptionSigns(load.at, load.recomputed_tokens, now, known.thrashing or recent)
    return PreemptionSigns(load.at, load.recomputed_tokens, known.seen_at, known.thrashing and recent)


def _is_sign(known: PreemptionSigns, load: Load) -> bool:
    before, after = known.recomputed_tokens, load.recomputed_tokens
    return bool(load.preempted_tokens) or (before is not None and after is not None and after > before)
