"""Decides which cores processes are bound to: their own, or others while programs of others compute there. Pure.

An engine is faster when bound to the cores of its slot, as long as it has them to itself. Beside a program that
computes all the time it may wait for most of the time, while other cores are idle. The same holds for the processes
without an engine, which may go to any other cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

# Computes how long threads ran and waited for a core. Pure; `state/machine/threads.py` reads the kernel's counters.
#
# The kernel counts a thread's waiting only when it ends. So a thread that is runnable, and has neither run nor waited
# since the last reading, has waited all the time.


@dataclass(frozen=True)
class ThreadTimes:
    """A thread's counters since its start, in seconds. `core`: the core on which it runs, or ran last."""

    ran_s: float
    waited_s: float
    runnable: bool
    core: int


@dataclass(frozen=True)
class Shares:
    """The sums over several threads between two readings, in seconds. `ran_s` is by core."""

    seconds: float
    waited_s: float
    ran_s: Mapping[int, float]


def waited_between(before: ThreadTimes, after: ThreadTimes, seconds: float) -> float:
    """The time for which the thread was runnable without a core, between two readings that are `seconds` apart."""
    waited_s, ran_s = after.waited_s - before.waited_s, after.ran_s - before.ran_s
    if waited_s <= 0 and ran_s <= 0:
        return seconds if before.runnable and after.runnable else 0.0
    return min(max(waited_s, 0.0), seconds)


def shares_between(before: Mapping[int, ThreadTimes], after: Mapping[int, ThreadTimes], seconds: float) -> Shares:
    """Sum over threads, by id, between two readings. A thread that only the later one has began in between."""
    ran: dict[int, float] = {}
    waited_s = 0.0
    for thread, new in after.items():
        old = before.get(thread, ThreadTimes(0.0, 0.0, False, new.core))
        waited_s += waited_between(old, new, seconds)
        ran[new.core] = ran.get(new.core, 0.0) + min(max(new.ran_s - old.ran_s, 0.0), seconds)
    return Shares(seconds, waited_s, ran)


@dataclass(frozen=True)
class BindingLimits:
    """Thresholds for leaving the own cores and for returning. Shares are fractions of a core's time."""

    waiting: float = 0.3
    """An engine is starved if its threads wait for a core for more of the time, because of other processes."""
    crowded: float = 0.4
    """Others use at least this share of a core of the starved threads. With less, these wait for each other, or for the
    few processes that wake up for every token."""
    quieter: float = 0.25
    """Others use so much less of the cores an engine goes to than of those it leaves."""
    quieter_home: float = 0.1
    """The same as `quieter`, for going to its own cores."""
    starved_s: float = 0.2
    """Threads leave their cores after being starved for so long, in consecutive measurements."""
    settle_s: float = 1.0
    """Threads stay where they went for so long at least, because earlier measurements do not apply there."""
    quiet: float = 0.25
    """The own cores count as quiet while others use at most this share of each."""
    quiet_s: float = 3.0
    """Threads return to their own cores once these were quiet for so long. The time doubles after each early return."""
    quiet_max_s: float = 60.0
    proven_s: float = 30.0
    """A return counts as early unless the threads then stay for so long."""


@dataclass(frozen=True)
class Binding:
    """The cores of some processes. `home`: their own; `cores`: those that they are bound to now. `anywhere`: when they
    leave, they go to all cores of the machine, and not to as many as they have."""

    home: frozenset[int]
    cores: frozenset[int]
    anywhere: bool = False
    since: float = float("-inf")
    """The time at which they were bound to `cores`."""
    starving_s: float = 0.0
    quiet_for_s: float = 0.0
    return_after_s: float = BindingLimits.quiet_s
    """The time for which `home` must be quiet before the processes return."""

    @property
    def at_home(self) -> bool:
        return self.cores == self.home


def others_of(busy_s: Mapping[int, float], ours_s: Mapping[int, float], seconds: float) -> dict[int, float]:
    """By core: the share of `seconds` in which it was busy with processes of others. `ours_s`: with our own."""
    if seconds <= 0:
        return {}
    return {core: min(max(busy - ours_s.get(core, 0.0), 0.0) / seconds, 1.0) for core, busy in busy_s.items()}


def rebind(
    binding: Binding, shares: Shares, others: Mapping[int, float], now: float, limits: BindingLimits | None = None
) -> Binding:
    """Decide after a measurement. `others`: the share that others used of each core that may be used."""
    limits = limits or BindingLimits()
    binding = _noted(binding, shares, others, limits)
    if binding.starving_s >= limits.starved_s and (better := _better(binding, others, now, limits)):
        return _moved(binding, better, now, limits)
    if not binding.at_home and binding.quiet_for_s >= binding.return_after_s:
        return _moved(binding, binding.home, now, limits)
    return binding


def _noted(binding: Binding, shares: Shares, others: Mapping[int, float], limits: BindingLimits) -> Binding:
    starved = shares.waited_s > limits.waiting * shares.seconds and _worst(binding.cores, others) >= limits.crowded
    quiet = not binding.at_home and _worst(binding.home, others) <= limits.quiet
    return replace(
        binding,
        starving_s=binding.starving_s + shares.waited_s if starved else 0.0,
        quiet_for_s=binding.quiet_for_s + shares.seconds if quiet else 0.0,
    )


def _better(binding: Binding, others: Mapping[int, float], now: float, limits: BindingLimits) -> frozenset[int] | None:
    """The cores to go to, if that is worth it: the quietest ones, as many as the processes have, or all."""
    if binding.anywhere:
        return frozenset(others) if binding.at_home and len(others) > len(binding.home) else None
    if not binding.at_home and now - binding.since < limits.settle_s:
        return None
    # Among equally quiet cores, prefer those that they have.
    ranked = sorted(others, key=lambda core: (others[core], core not in binding.cores, core))
    best, here = frozenset(ranked[: len(binding.home)]), _worst(binding.cores, others)
    if best != binding.cores and _worst(best, others) <= here - limits.quieter:
        return best
    if not binding.at_home and _worst(binding.home, others) <= here - limits.quieter_home:
        return binding.home
    return None


def _moved(binding: Binding, cores: frozenset[int], now: float, limits: BindingLimits) -> Binding:
    return_after_s = binding.return_after_s
    if binding.at_home:
        # `since` is infinitely long ago at first, so the first departure counts as one after a long stay.
        proven = now - binding.since >= limits.proven_s
        return_after_s = limits.quiet_s if proven else min(2 * return_after_s, limits.quiet_max_s)
    return Binding(binding.home, cores, binding.anywhere, now, return_after_s=return_after_s)


def _worst(cores: Iterable[int], others: Mapping[int, float]) -> float:
    """The largest share that others use of one of the cores; 0 if none is known. Threads of an engine wait for each
    other, so the slowest core counts."""
    return max((others.get(core, 0.0) for core in cores), default=0.0)
