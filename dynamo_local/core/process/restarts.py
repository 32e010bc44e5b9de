"""Decides when a process that died is started again, and when it is given up. Pure.

A service that has never been ready is given up after a few attempts, or at once if its exit code tells that its
configuration is wrong: another attempt cannot help, and the user waits for an answer. A service that has been ready is
started again for ever. The delay doubles from death to death, and is reset once it has been ready for a while.

circusd, which starts all others, is started again for ever, as requests do not need it. It is given up only when it
cannot be started.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
