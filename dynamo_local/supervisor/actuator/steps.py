"""The next steps of changes that were left half done: what is desired against what is observed. Pure.

A change may be broken off between any two of its steps. What is left tells what was under way, and what follows:

    a watcher without a claim    EndUnclaimed          ended and removed
    reserved, not claimed        ReleaseReservation    the reservation is released
    claimed, no watcher          ReleaseClaim          the start never happened, or the process is gone: released
    retiring                     FinishRetiring        told to end again, awaited, released
    restarting                   FinishRestarting      told to end again, awaited, started again, awaited
    starting, with a watcher     AwaitStart            awaited, then settled, or undone

A watcher has one step at most, and none once its step was taken. One that is broken off itself is named again by the
next look. Whoever holds the lock on changes is the only one to make any, so all that is found then was left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from state.statefile.model import Component, State


@dataclass(frozen=True)
class _OfWatcher:
    watcher: str


class EndUnclaimed(_OfWatcher):
    """End a watcher that has no claim."""


class ReleaseReservation(_OfWatcher):
    """Release devices that are reserved for a watcher and not claimed."""


@dataclass(frozen=True)
class ReleaseClaim(_OfWatcher):
    """Release the claim on these devices: the watcher has no process, and is about to have none."""

    devices: tuple[int, ...]


class FinishRetiring(_OfWatcher):
    """End the process for good, and release what it holds."""


class FinishRestarting(_OfWatcher):
    """End the process, and start the next one under its name."""


class AwaitStart(_OfWatcher):
    """Await that the process is ready, and settle it; undo its start if it fails."""


Step = EndUnclaimed | ReleaseReservation | ReleaseClaim | FinishRetiring | FinishRestarting | AwaitStart

_KINDS = (EndUnclaimed, ReleaseReservation, ReleaseClaim, FinishRetiring, FinishRestarting, AwaitStart)
"""In the order in which steps are taken: what frees devices precedes what may start a process."""


def next_steps(
    state: State,
    statuses: Collection[str],
    reservations: Collection[str],
    among: Callable[[str], bool] = lambda _: True,
) -> tuple[Step, ...]:
    """Name the steps that finish what was left half done, those of one kind together, which may be taken at the same
    time.

    `statuses`: the watchers that their places know, also those whose process is unknown, or is about to be started
    again. They must have been read after `state`: a claim precedes its watcher, so a claim that is younger than they
    are would look dead. `reservations`: the watchers for which a place has something reserved. `among`: the watchers
    that are looked at.
    """
    held = {name: component for name, component in state.components.items() if component.holds}
    found: list[Step] = [EndUnclaimed(name) for name in unclaimed(state, statuses)]
    found += [ReleaseReservation(name) for name in reservations if name not in statuses and name not in held]
    found += [step for entry in held.values() if (step := _step_of(entry, statuses)) is not None]
    return tuple(sorted((step for step in found if among(step.watcher)), key=lambda step: _KINDS.index(type(step))))


def unclaimed(state: State, statuses: Collection[str]) -> tuple[str, ...]:
    """The watchers without a claim, sorted. `statuses` as of `next_steps`."""
    return tuple(sorted(name for name in statuses if (c := state.components.get(name)) is None or not c.holds))


def _step_of(claimed: Component, statuses: Collection[str]) -> Step | None:
    """The step that an entry which holds something needs, if it needs one."""
    name = claimed.watcher_name
    match claimed.phase:
        case "reserved":
            return ReleaseReservation(name)
        case "restarting":
            return FinishRestarting(name)
        case _ if name not in statuses:
            return ReleaseClaim(name, claimed.devices)
        case "retiring":
            return FinishRetiring(name)
        case "starting":
            return AwaitStart(name)
        case None:
            return None
