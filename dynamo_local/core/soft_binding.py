"""Which cores an engine on a CPU slot keeps to: those of its slot, others while somebody else computes there. Pure.

An engine bound to its cores is the faster for it as long as it has them to itself. Beside a process that computes
without a pause it may wait for most of the time, while other cores are idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dynamo_local.core.run_queue import Shares


@dataclass(frozen=True)
class BindingLimits:
    """When an engine goes elsewhere, and when it comes back. Shares are of a core's time."""

    waiting: float = 0.3
    """An engine that waits for more of the time is starved, if it is others it waits for."""
    crowded: float = 0.25
    """Others have at least so much of the core of a starved engine; with less, its own threads wait for each other."""
    quieter: float = 0.25
    """Others have so much less of where it goes than of where it is."""
    starved_s: float = 0.2
    """It goes when it has waited for so long, in looks in a row at which it was starved."""
    settle_s: float = 1.0
    """It stays elsewhere for so long before it is moved on: figures of before say nothing."""
    quiet: float = 0.15
    """Others have at most so much of its own cores when it comes back."""
    quiet_s: float = 3.0
    """For so long they have been quiet by then; twice as long each time it was wrong."""
    quiet_max_s: float = 60.0
    proven_s: float = 30.0
    """It was right to come back if it stays for so long."""


@dataclass(frozen=True)
class Binding:
    """Where an engine is. `home`: the cores of its slot; `cores`: those that it keeps to at present."""

    home: frozenset[int]
    cores: frozenset[int]
    since: float = float("-inf")
    """When it came to these cores."""
    starving_s: float = 0.0
    quiet_for_s: float = 0.0
    patience_s: float = BindingLimits.quiet_s

    @property
    def at_home(self) -> bool:
        return self.cores == self.home


def others_of(busy_s: Mapping[int, float], shares: Shares) -> dict[int, float]:
    """Each core's share of time that others had, of the seconds it was busy between the same two looks."""
    if shares.seconds <= 0:
        return {}
    return {
        core: min(max(seconds - shares.ran_s.get(core, 0.0), 0.0) / shares.seconds, 1.0)
        for core, seconds in busy_s.items()
    }


def rebind(
    binding: Binding, shares: Shares, others: Mapping[int, float], now: float, limits: BindingLimits | None = None
) -> Binding:
    """Decide anew after a look. `others`: the cores that it may use, and what others have had of them."""
    limits = limits or BindingLimits()
    binding = _noted(binding, shares, others, limits)
    if binding.starving_s >= limits.starved_s and (better := _better(binding, others, now, limits)):
        return _moved(binding, better, now, limits)
    if not binding.at_home and binding.quiet_for_s >= binding.patience_s:
        return replace(_moved(binding, binding.home, now, limits), patience_s=binding.patience_s)
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
    """The quietest cores, as many as it has, if going there is worth it."""
    if not binding.at_home and now - binding.since < limits.settle_s:
        return None
    # Of cores alike, those that it has.
    ranked = sorted(others, key=lambda core: (others[core], core not in binding.cores, core))
    best = frozenset(ranked[: len(binding.home)])
    if best == binding.cores or _worst(best, others) > _worst(binding.cores, others) - limits.quieter:
        return None
    return best


def _moved(binding: Binding, cores: frozenset[int], now: float, limits: BindingLimits) -> Binding:
    patience_s = binding.patience_s
    if binding.at_home:
        # The first time, and after a long stay, as if it had never been away.
        proven = now - binding.since >= limits.proven_s
        patience_s = limits.quiet_s if proven else min(2 * patience_s, limits.quiet_max_s)
    return Binding(binding.home, cores, now, patience_s=patience_s)


def _worst(cores: Iterable[int], others: Mapping[int, float]) -> float:
    """Of a team of threads that wait for each other, the slowest counts. Of a core that is gone nothing is known."""
    return max((others.get(core, 0.0) for core in cores), default=0.0)
