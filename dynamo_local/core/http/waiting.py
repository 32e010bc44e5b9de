"""Requests that are held while their model has no worker, instead of being refused: until when, and what they are told.

A request is held from its admission until its model takes requests, the model is known to take none, or its time is
over. If it asks for a stream, its answer begins after a second, and has comments until its first token, so that neither
the client nor a proxy takes the silence for a failure. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from dynamo_local.core.messages.endpoints import EndpointView

BEGIN_AFTER_S = 1.0
"""Wait after which the answer to a request for a stream begins. Until then a refusal has its own HTTP status."""

COMMENT_EVERY_S = 5.0
"""Between two comments in a stream. Proxies end a connection that is silent for a minute, some for 15 s."""


@dataclass(frozen=True)
class HoldLimits:
    """Bounds on requests that wait for the first worker of their model."""

    hold_timeout_s: float = field(
        default=300.0,
        metadata={
            "help": "How long a request waits while its model has no ready worker but is to have one, in s. After that "
            "it gets status 503. 0: it gets it at once."
        },
    )
    max_held: int = field(
        default=256,
        metadata={
            "help": "Maximum number of requests for each model that wait while it has no ready worker, with all "
            "frontends together. More get status 429. They count in max-requests as well, and by class of priority and "
            "key as there."
        },
    )


@dataclass(frozen=True)
class Unready:
    """Why a model takes no requests now. `comes`: whether it is to take some soon. `for_good`: it takes none before
    another order, so that it helps nobody to ask again."""

    why: str
    comes: bool = True
    for_good: bool = False


@dataclass(eq=False)
class Held:
    """A request that is held. `since`: its admission. `told_at`: when its client was told last. Times in s."""

    sequences: int
    since: float
    streams: bool
    priority: int = 0
    key: str = ""
    """The API key that it came with; empty: none."""
    told_at: float | None = None
    woken_from: str = ""
    """How its endpoint was idle ("parked", "asleep") when or after it came; empty: it was not."""


@dataclass(frozen=True)
class Go:
    """The request goes on to its model."""


@dataclass(frozen=True)
class Wait:
    """The request waits. Without a change before, look again at `until`. `tell`: its client is to be told so now."""

    until: float
    tell: bool


@dataclass(frozen=True)
class GiveUp:
    """The request is refused, for this reason. `full`: too many wait already; otherwise it would wait for nothing, and
    `for_good` is as in `Unready`."""

    why: str
    full: bool = False
    for_good: bool = False


def refused(unready: Unready, waiting: int, limits: HoldLimits, *, has_room: bool) -> GiveUp | None:
    """Return why a request that has just come is not held; None: it is. `waiting`: requests held for the model now.
    `has_room`: whether one more may be."""
    if not unready.comes or limits.hold_timeout_s <= 0:
        return GiveUp(unready.why, for_good=unready.for_good)
    if not has_room:
        why = f"{unready.why}; {waiting} requests (setting max-held) wait for it already; send it again later"
        return GiveUp(why, full=True)
    return None


def next_step(held: Held, unready: Unready | None, limits: HoldLimits, now: float) -> Go | Wait | GiveUp:
    """Decide on a request that is held. `unready`: of its model; None: that takes requests."""
    if unready is None:
        return Go()
    if not unready.comes:
        return GiveUp(unready.why, for_good=unready.for_good)
    deadline = held.since + limits.hold_timeout_s
    if now >= deadline:
        waited = f"the request has waited for {limits.hold_timeout_s:g} s (setting hold-timeout-s)"
        return GiveUp(f"{unready.why}; {waited}; send it again later")
    if not held.streams:
        return Wait(deadline, tell=False)
    tell_at = held.since + BEGIN_AFTER_S if held.told_at is None else held.told_at + COMMENT_EVERY_S
    if now < tell_at:
        return Wait(min(tell_at, deadline), tell=False)
    return Wait(min(now + COMMENT_EVERY_S, deadline), tell=True)


# Endpoints that are woken because requests wait for them: when the server is asked, and what those who wait are told.
#
# A frontend asks as soon as a request that is held needs it, and again each second until a worker is ready: the server
# gives up a start for which nobody asks any more. However many requests wait, there is one question at a time for each
# endpoint. Pure.

AGAIN_S = 1.0
"""Between two questions for one need. A refusal is the answer to requests that come within the same time."""

Idle = Literal["parked", "asleep"]
"""How an endpoint has no ready worker that gets one by being asked for."""

Outcome = Literal["", "asked", "granted", "refused", "unanswered"]


@dataclass(frozen=True)
class Asking:
    """What the server was asked for an endpoint last, and what came of it. `at`: since when that is so, in s.

    `why`: the refusal, or why there was no answer; the latter is kept until there is one.
    """

    outcome: Outcome = ""
    at: float = -math.inf
    why: str = ""

    def is_recent(self, now: float) -> bool:
        """Whether it is too early to ask again for the same need."""
        return self.outcome != "" and now < self.at + AGAIN_S

    def begun(self, now: float) -> Asking:
        """The server is being asked."""
        return Asking("asked", now, self.why if self.outcome == "unanswered" else "")

    def answered(self, refused: str, now: float) -> Asking:
        """The server has answered, with a refusal unless that is empty."""
        return Asking("refused" if refused else "granted", now, refused)

    def unanswered(self, why: str, now: float) -> Asking:
        """Notes that the server has not answered."""
        return Asking("unanswered", now, why)


def idle_as(view: EndpointView | None, *, parked: bool) -> Idle | None:
    """How an endpoint is idle that has no ready worker; None: it is not. `parked`: one of its workers is known to be
    parked. The board may say "ready" for a moment after that."""
    if view is None:
        return None
    state = view.status.state
    if state in ("parked", "asleep"):
        return "parked" if state == "parked" else "asleep"
    if state not in ("ready", "updating"):
        return None
    if parked:
        return "parked"
    return "asleep" if view.spec.min_workers == 0 else None


def is_waking(view: EndpointView | None) -> bool:
    """Whether an endpoint comes up for those who ask for it."""
    if view is None:
        return False
    state = view.status.state
    return state == "waking" or (view.spec.min_workers == 0 and state in ("waiting", "fetching", "starting"))


def may_be_tried(view: EndpointView | None) -> bool:
    """Whether an endpoint has failed to wake, and is tried again for a request that comes after that."""
    return view is not None and view.status.state == "failed" and view.spec.min_workers == 0


def judged(unready: Unready, asking: Asking, now: float) -> Unready:
    """What those are told who wait for an endpoint that is idle, or may be tried again. `unready`: by the board."""
    recent = asking.is_recent(now)
    if asking.outcome == "refused" and recent:
        return Unready(asking.why, comes=False)
    why = unready.why
    if asking.outcome in ("asked", "unanswered") and asking.why:
        why = f"{why}; {asking.why}"
    hopeful = asking.outcome == "asked" or (asking.outcome == "granted" and recent)
    return Unready(why, unready.comes or hopeful)
