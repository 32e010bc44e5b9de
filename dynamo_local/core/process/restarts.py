"""Decides when a process that died is started again, and when it is given up. Pure.

A service that has never been ready is given up after a few attempts, or at once if its exit code tells that its
configuration is wrong: another attempt cannot help, and the user waits for an answer. A service that has been ready is
started again for ever. The delay doubles from death to death, and is reset once it has been ready for a while.

circusd, which starts all others, is started again for ever, as requests do not need it. It is given up only when it
cannot be started.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

USAGE_EXIT_CODE = 2
"""The exit code of a process that was asked for something that cannot be done (errors.UsageError)."""


@dataclass(frozen=True)
class RestartLimits:
    """Limits for services. `healthy_after_s`: the time of readiness after which earlier deaths no longer count.
    `max_failed_starts`: attempts of a service that has never been ready."""

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0
    max_failed_starts: int = 3


@dataclass(frozen=True)
class CircusLimits:
    """Limits for circusd. It is started again at once, then after `first_delay_s`, which doubles with each death within
    `within_s`, up to `max_delay_s`. It is given up when `max_failures` in a row died before they had taken over."""

    max_failures: int = 3
    within_s: float = 60.0
    first_delay_s: float = 0.5
    max_delay_s: float = 4.0


@dataclass(frozen=True)
class CircusRecord:
    """The history of circusd. `deaths`: times of its recent deaths. `failures`: number of those in a row that had not
    taken over."""

    deaths: tuple[float, ...] = ()
    failures: int = 0


@dataclass(frozen=True)
class LifeRecord:
    """The history of one watcher's processes. `deaths`: number of deaths since it was healthy last."""

    deaths: int = 0
    ready_since: float | None = None
    ever_ready: bool = False


@dataclass(frozen=True)
class Restart:
    """The decision to start the process again, not before `at`."""

    at: float
    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """The decision not to start the process again. `reason` completes the sentence "SERVICE ..."."""

    reason: str


def became_ready(record: LifeRecord, now: float) -> LifeRecord:
    """Record that the process is ready. Repeating it changes nothing."""
    if record.ready_since is not None:
        return record
    return replace(record, ready_since=now, ever_ready=True)


def died(
    record: LifeRecord, exit_code: int | None, limits: RestartLimits, now: float
) -> tuple[Restart | GiveUp, LifeRecord]:
    """Decide on a process that has ended. `exit_code`: negative for a signal, None if it is not known."""
    healthy = record.ready_since is not None and now - record.ready_since >= limits.healthy_after_s
    deaths = 1 if healthy else record.deaths + 1
    after = replace(record, deaths=deaths, ready_since=None)
    if not record.ever_ready:
        if exit_code == USAGE_EXIT_CODE:
            return GiveUp("did not start"), after
        if deaths >= limits.max_failed_starts:
            return GiveUp(f"failed to start {deaths} times"), after
    delay_s = _delay_s(deaths, limits)
    return Restart(now + delay_s, delay_s), after


def circusd_died(
    record: CircusRecord, took_over: bool, limits: CircusLimits, now: float
) -> tuple[Restart | GiveUp, CircusRecord]:
    """Decide on a circusd that has ended. `took_over`: whether it had been told of all watchers."""
    recent = (*(death for death in record.deaths if now - death < limits.within_s), now)
    after = CircusRecord(recent, 0 if took_over else record.failures + 1)
    if after.failures >= limits.max_failures:
        return GiveUp(f"could not be started {after.failures} times in a row"), after
    delay_s = 0.0 if len(recent) == 1 else _doubled(limits.first_delay_s, len(recent) - 1, limits.max_delay_s)
    return Restart(now + delay_s, delay_s), after


def _delay_s(deaths: int, limits: RestartLimits) -> float:
    return _doubled(limits.first_delay_s, deaths, limits.max_delay_s)


def _doubled(first_s: float, deaths: int, max_s: float) -> float:
    # The exponent is bounded: a float power would overflow after about a thousand deaths.
    return float(min(max_s, first_s * 2.0 ** min(deaths - 1, 32)))


# Decides which prepared processes there are: those that are ordered, as far as memory allows. Pure.
#
# A prepared process has loaded the weights of a model, and is forked for workers that use them (process/forkserver).

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


# Decides when a circusd that does not answer is reported, and when it is given up. Pure.
#
# Silence alone is not death: circusd may be stopped, or starved by other programs for many seconds, and go on
# afterwards.


@dataclass(frozen=True)
class CircusDeadlines:
    """`report_after_s`: silence until the first report; each further report comes when the silence has doubled.
    `give_up_after_s`: silence until circusd is killed and replaced, as nothing can be started or stopped without it."""

    report_after_s: float = 10.0
    give_up_after_s: float = 120.0

    def report(self, silent_s: float, reported_s: float | None) -> bool:
        """Whether to report the silence. `reported_s`: its length at the last report; None if there was none."""
        return silent_s >= (self.report_after_s if reported_s is None else 2 * reported_s)

    def give_up(self, silent_s: float) -> bool:
        """Whether to wait no longer."""
        return silent_s >= self.give_up_after_s
