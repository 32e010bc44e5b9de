"""Endpoints that share devices, as the turns see them, and the limits of a turn. Pure."""

from __future__ import annotations

from dataclasses import dataclass

TURN_S = 30.0
"""How long an endpoint with requests keeps its devices while others wait for them."""


PAUSE_S = 0.2
"""How long an endpoint may be without a request within its turn before it yields."""


@dataclass(frozen=True)
class Limits:
    """`turn_s` and `pause_s` in seconds: see TURN_S and PAUSE_S."""

    turn_s: float = TURN_S
    pause_s: float = PAUSE_S


@dataclass(frozen=True)
class Claim:
    """A worker, by the name of its watcher, and what it has of each of its devices."""

    worker: str
    devices: tuple[int, ...]
    share: float = 1.0
    prefill: bool = False


@dataclass(frozen=True)
class Contender:
    """An endpoint now. Times are of one clock, in seconds.

    `workers`: those that are present (starting, ready or parked) in the order in which they are kept; `ending`: those
    whose devices become free in a moment. `least`, `least_prefill`: minimums. `running`: requests under way, without
    those that are held; None if a frontend does not say. `idle_since`: when it had its last request, or became ready;
    None while it has one, held or running. `turn_since`: when its first worker became ready; None before.
    `needs`: amounts of devices of the workers that it lacks to serve a request, while no worker of it is present;
    `waits_since`: since when somebody waits for them, a request or its owner; None if nobody does. `kept`: a schedule
    keeps it awake.
    """

    name: str
    workers: tuple[Claim, ...] = ()
    ending: tuple[Claim, ...] = ()
    least: int = 0
    least_prefill: int = 0
    running: int | None = 0
    idle_since: float | None = None
    turn_since: float | None = None
    needs: tuple[float, ...] = ()
    waits_since: float | None = None
    kept: bool = False
