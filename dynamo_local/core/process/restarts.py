"""When a service that died is started again, and when it is given up. Pure; fed with what happened and the
time.

A service that has never been ready is given up after a few attempts, or at once if it says that its
configuration is wrong: trying again cannot help, and the user is waiting for a word. One that has been ready
is started again for ever, with a delay that doubles from death to death and starts afresh once it has been
ready for a while.

circusd, which starts all others, is started again for ever: requests do without it meanwhile. It is given up when it
cannot be started.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

USAGE_EXIT_CODE = 2
"""What a process ends with when it was asked for something that cannot be done (errors.UsageError)."""


@dataclass(frozen=True)
class RestartLimits:
    """`healthy_after_s` of readiness make earlier deaths forgotten."""

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0
    max_failed_starts: int = 3


@dataclass(frozen=True)
class CircusLimits:
    """circusd is started again at once, then after `first_delay_s`, which doubles with each death within `within_s`, up
    to `max_delay_s`. When `max_failures` in a row have died before they had taken over, it is given up."""

    max_failures: int = 3
    within_s: float = 60.0
    first_delay_s: float = 0.5
    max_delay_s: float = 4.0


@dataclass(frozen=True)
class CircusRecord:
    """`deaths`: when circusd has died lately. `failures`: how many in a row had not taken over."""

    deaths: tuple[float, ...] = ()
    failures: int = 0


@dataclass(frozen=True)
class LifeRecord:
    """What is known of one watcher's process and its predecessors. `deaths` counts those in a row."""

    deaths: int = 0
    ready_since: float | None = None
    ever_ready: bool = False


@dataclass(frozen=True)
class Restart:
    """Start it again, not before `at`."""

    at: float
    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """Do not start it again. `reason` completes "SERVICE ..."."""

    reason: str


def became_ready(record: LifeRecord, now: float) -> LifeRecord:
    """The process said that it is ready. Saying so again changes nothing."""
    if record.ready_since is not None:
        return record
    return replace(record, ready_since=now, ever_ready=True)


def died(
    record: LifeRecord, exit_code: int | None, limits: RestartLimits, now: float
) -> tuple[Restart | GiveUp, LifeRecord]:
    """The process ended. `exit_code` is negative for a signal, None if it is not known."""
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
    """circusd ended. `took_over`: whether it knew of all that runs."""
    recent = (*(death for death in record.deaths if now - death < limits.within_s), now)
    after = CircusRecord(recent, 0 if took_over else record.failures + 1)
    if after.failures >= limits.max_failures:
        return GiveUp(f"could not be started {after.failures} times in a row"), after
    delay_s = 0.0 if len(recent) == 1 else _doubled(limits.first_delay_s, len(recent) - 1, limits.max_delay_s)
    return Restart(now + delay_s, delay_s), after


def _delay_s(deaths: int, limits: RestartLimits) -> float:
    return _doubled(limits.first_delay_s, deaths, limits.max_delay_s)


def _doubled(first_s: float, deaths: int, max_s: float) -> float:
    # The exponent is bounded because a float power overflows long before a server ends.
    return float(min(max_s, first_s * 2.0 ** min(deaths - 1, 32)))
