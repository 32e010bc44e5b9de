"""Decides which prepared processes there are: those that are ordered, as far as memory allows. Pure.

A prepared process has loaded the weights of a model, and is forked for workers that use them (process/forkserver).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dynamo_local.core.process.restarts import GiveUp, LifeRecord, RestartLimits, became_ready, died

LIMITS = RestartLimits(first_delay_s=0.5, max_delay_s=60.0, healthy_after_s=60.0, max_failed_starts=3)
"""For prepared processes that end by themselves. Workers start without them meanwhile."""

_PEAK = 1.25
"""Memory that loading takes at most, in sizes of the weights: layers are loaded one by one, and then repacked."""


@dataclass(frozen=True)
class Attempts:
    """The history of one prepared process since it was ordered last. `ordered`: which order that was, by a number that
    each has of its own. `not_before`: the time before which it is not made; infinite once it is given up."""

    ordered: int
    life: LifeRecord = field(default_factory=LifeRecord)
    not_before: float = 0.0


@dataclass(frozen=True)
class Step:
    """What to do next. `end`: keys of processes that nobody wants any more. `make`: key of the one to make. `look_at`:
    time of the next decision, if nothing happens before; None: none is due."""

    end: tuple[str, ...] = ()
    make: str | None = None
    look_at: float | None = None


def next_step(ordered: Collection[str], running: Collection[str], attempts: Mapping[str, Attempts], now: float) -> Step:
    """Decide; at most one is made at a time. `ordered`, `running`: keys. `attempts`: of all ordered."""
    end = tuple(sorted(set(running) - set(ordered)))
    due = {key: attempts[key].not_before for key in ordered if key not in running}
    make = next((key for key in sorted(due) if due[key] <= now), None)
    later = [at for key, at in due.items() if key != make and at < math.inf]
    return Step(end, make, min(later, default=None))


def reordered(attempts: Attempts | None, ordered: int) -> Attempts:
    """Take note of an order. Another one than before is tried at once, whatever became of the one before."""
    return attempts if attempts is not None and attempts.ordered == ordered else Attempts(ordered)


def is_ready(attempts: Attempts, now: float) -> Attempts:
    """Take note that the process is ready."""
    return replace(attempts, life=became_ready(attempts.life, now))


def ended(attempts: Attempts, exit_code: int | None, now: float) -> Attempts:
    """Take note that the process has ended by itself. It is made again later, or given up until it is ordered anew."""
    decision, life = died(attempts.life, exit_code, LIMITS, now)
    return replace(attempts, life=life, not_before=math.inf if isinstance(decision, GiveUp) else decision.at)


def given_up(attempts: Attempts) -> Attempts:
    """Take note that it is not to be made until it is ordered anew."""
    return replace(attempts, not_before=math.inf)


def missing_bytes(free: int | None, weights: int, keep_free: int) -> int:
    """How many bytes of memory are missing to load weights of that size and leave `keep_free`; 0 if there are enough,
    or if it is not known how many there are."""
    return 0 if free is None else max(math.ceil(weights * _PEAK) + keep_free - free, 0)
