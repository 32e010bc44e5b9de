"""Which cores processes keep to: their own ones, others while somebody else computes there. Pure.

An engine bound to the cores of its slot is the faster for it as long as it has them to itself. Beside a process that
computes without a pause it may wait for most of the time, while other cores are idle. It is the same with the processes
beside the engines, for which any other core will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dynamo_local.core.process.run_queue import Shares


@dataclass(frozen=True)
class BindingLimits:
    """When processes go elsewhere, and when they come back. Shares are of a core's time."""

    waiting: float = 0.3
    """An engine is starved if its threads wait for a core for more of the time, because of other processes."""
    crowded: float = 0.4
    """Others have at least so much of the core of the starved; with less, their own threads wait for each other, or for
    the few that wake up for every token."""
    quieter: float = 0.25
    """Others have so much less of where an engine goes than of where it is."""
    quieter_home: float = 0.1
    """The same, if that is its own cores."""
    starved_s: float = 0.2
    """The threads leave their cores after being starved for so long, in consecutive looks."""
    settle_s: float = 1.0
    """The threads stay where they went for so long at least: what was measured before the move says nothing."""
    quiet: float = 0.25
    """Others have at most so much of their own cores when they come back."""
    quiet_s: float = 3.0
    """For so long these have been quiet by then; twice as long each time it was wrong."""
    quiet_max_s: float = 60.0
    proven_s: float = 30.0
    """A return counts as right if the threads then stay for so long."""


@dataclass(frozen=True)
class Binding:
    """Where processes are. `home`: the cores that are meant for them; `cores`: those that they keep to at present.
    `anywhere`: when they leave, they go to all cores that there are, not to as many as they have."""

    home: frozenset[int]
    cores: frozenset[int]
    anywhere: bool = False
    since: float = float("-inf")
    """When they came to these cores."""
    starving_s: float = 0.0
    quiet_for_s: float = 0.0
    patience_s: float = BindingLimits.quiet_s

    @property
    def at_home(self) -> bool:
        return self.cores == self.home


def others_of(busy_s: Mapping[int, float], ours_s: Mapping[int, float], seconds: float) -> dict[int, float]:
    """Each core's share of so many seconds in which it was busy, but not with ours."""
    if seconds <= 0:
        return {}
    return {core: min(max(busy - ours_s.get(core, 0.0), 0.0) / seconds, 1.0) for core, busy in busy_s.items()}


def rebind(
    binding: Binding, shares: Shares, others: Mapping[int, float], now: float, limits: BindingLimits | None = None
) -> Binding:
    """Decide anew after a look. `others`: all cores that may be used, and what others have had of them."""
    limits = limits or BindingLimits()
    binding = _noted(binding, shares, others, limits)
    if binding.starving_s >= limits.starved_s and (better := _better(binding, others, now, limits)):
        return _moved(binding, better, now, limits)
    if not binding.at_home and binding.quiet_for_s >= binding.patience_s:
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
    """The cores to go to, if that is worth it: the quietest ones, as many as they have, or all."""
    if binding.anywhere:
        return frozenset(others) if binding.at_home and len(others) > len(binding.home) else None
    if not binding.at_home and now - binding.since < limits.settle_s:
        return None
    # Of cores alike, those that they have.
    ranked = sorted(others, key=lambda core: (others[core], core not in binding.cores, core))
    best, here = frozenset(ranked[: len(binding.home)]), _worst(binding.cores, others)
    if best != binding.cores and _worst(best, others) <= here - limits.quieter:
        return best
    if not binding.at_home and _worst(binding.home, others) <= here - limits.quieter_home:
        return binding.home
    return None


def _moved(binding: Binding, cores: frozenset[int], now: float, limits: BindingLimits) -> Binding:
    patience_s = binding.patience_s
    if binding.at_home:
        # The first time, and after a long stay, as if they had never been away.
        proven = now - binding.since >= limits.proven_s
        patience_s = limits.quiet_s if proven else min(2 * patience_s, limits.quiet_max_s)
    return Binding(binding.home, cores, binding.anywhere, now, patience_s=patience_s)


def _worst(cores: Iterable[int], others: Mapping[int, float]) -> float:
    """Of a team of threads that wait for each other, the slowest counts. Of a core that is gone nothing is known."""
    return max((others.get(core, 0.0) for core in cores), default=0.0)
