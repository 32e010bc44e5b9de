"""Endpoints that are woken because requests wait for them: when the server is asked, and what those who wait are told.

A frontend asks as soon as a request that is held needs it, and again each second until a worker is ready: the server
gives up a start for which nobody asks any more. However many requests wait, there is one question at a time for each
endpoint. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.http.waiting.holding import Unready
from dynamo_local.core.messages.endpoints import EndpointView

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
