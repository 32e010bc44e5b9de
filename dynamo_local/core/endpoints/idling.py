"""When an endpoint's workers are parked, when they end, and when it is awake again. Pure.

    awake    --nothing asked for `park_s`-->   parked    (its workers stay, with paused engines)
    awake, parked --for `sleep_s`-->           asleep    (it has no workers)
    parked, asleep --a request, an order-->    awake
    awake    --its start fails-->              asleep    (after a request may have it tried again: `may_wake_at`)
    awake    --nobody waits for its start-->   asleep    (unless its owner or its schedule had it woken)

A demand that is not known is not none: nothing rests because of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dynamo_local.core.endpoints.spec import EndpointSpec

PARK_AFTER_S = 60.0
SLEEP_AFTER_S = 900.0
"""Times without a request, in seconds, for endpoints with `min_workers` 0."""

Rest = Literal["awake", "parked", "asleep"]

AT_START: Literal["start"] = "start"
RestCause = Literal["", "start", "idle", "order", "unasked", "swap", "failure", "update"]
"""Why an endpoint rests: nobody has asked for it since its server started, or for so long; it was ordered; who had it
woken has left; its devices were given to another endpoint; its start has failed; it was updated."""
WakeCause = Literal["request", "order", "schedule", "forecast", "update"]
"""What an endpoint is woken by. An update: one that gives it a minimum of workers."""

_PAUSES_S = (5.0, 15.0, 60.0)
_LEFT_S = 2.0
"""Time after which a start is broken off for which somebody has waited, and nobody does any more. A client that gives
up and tries again at once finds it under way."""
_UNASKED_S = 3.0
"""Time after which nobody waits any more who has not asked again, and was not seen to wait: frontends repeat themselves
every second."""
_REFUSED_S = 30.0
"""The same once workers start: they were asked for by requests that could not be held, and are sent again later."""


@dataclass(frozen=True)
class IdleTimes:
    """Times without a request, in seconds, after which workers are parked, and after which they end. None: never."""

    park_s: float | None
    sleep_s: float | None


@dataclass(frozen=True)
class Activity:
    """What is seen of an endpoint's use.

    `busy`: whether requests are under way or held; None if that is not known. `served`: a number that changes with
    requests which nobody saw under way. `ready`: workers that take requests. `begun`: whether workers start, or have
    started. `nearly`: whether the engine of one of them has started.
    """

    busy: bool | None
    served: int = 0
    ready: int = 0
    begun: bool = False
    nearly: bool = False


@dataclass(frozen=True)
class Idling:
    """Whether an endpoint is to be awake. Times are CLOCK_MONOTONIC, in seconds.

    `why`: the reason for `rest`, in words, and `cause` in one. `active_at`: last time of a demand, or of an order to
    wake. `pending`: rest that was ordered, and begins when no request is under way. `waking_since`: time of the order
    to wake, until a worker is ready. `asked`: that order came from a frontend. `waited`: somebody was seen to wait for
    it. `failures`: starts in a row that have failed, the last of them by `error`; before `may_wake_at` no request has
    another one tried.
    """

    rest: Rest = "awake"
    why: str = ""
    active_at: float = 0.0
    served: int = 0
    pending: Rest | None = None
    waking_since: float | None = None
    asked: bool = False
    waited: bool = False
    failures: int = 0
    error: str = ""
    may_wake_at: float = 0.0
    cause: RestCause = ""

    def failure(self, now: float) -> str:
        """Why it cannot be woken by a request now; empty if it can."""
        return self.error if self.rest != "awake" and now < self.may_wake_at else ""


def times_of(spec: EndpointSpec) -> IdleTimes:
    """The times of an endpoint, defaults filled in. What would be parked no earlier than it ends is not parked."""
    if spec.min_workers > 0:
        return IdleTimes(spec.park_after_s, None)
    sleep_s = SLEEP_AFTER_S if spec.sleep_after_s is None else spec.sleep_after_s
    park_s = PARK_AFTER_S if spec.park_after_s is None else spec.park_after_s
    return IdleTimes(park_s if park_s < sleep_s else None, sleep_s)


def at_start(spec: EndpointSpec, now: float) -> Idling:
    """An endpoint that was created just now, or whose server starts: without a minimum of workers, it has none."""
    if spec.min_workers > 0:
        return Idling(active_at=now)
    return Idling("asleep", "nobody has asked for it yet", now, cause=AT_START)


def looked(idling: Idling, times: IdleTimes, seen: Activity, now: float) -> Idling:
    """What follows from a look at the endpoint."""
    active = seen.busy is not False or seen.served != idling.served
    idling = replace(idling, served=seen.served)
    if idling.rest == "awake" and idling.waking_since is not None:
        return _waking(idling, times, seen, now)
    if idling.pending is not None and seen.busy is False:
        return replace(idling, rest=idling.pending, why="by order", cause="order", pending=None, active_at=now)
    if idling.rest == "parked" and seen.busy and seen.ready:
        # One was given a request just before it was parked.
        return replace(idling, rest="awake", why="", active_at=now)
    if active:
        return replace(idling, active_at=now)
    return _rested(idling, times, now)


def look_at(idling: Idling, times: IdleTimes) -> float | None:
    """The time at which another look may change something though nothing happens; None if none does."""
    if idling.rest == "asleep":
        return idling.may_wake_at if idling.error else None
    if idling.waking_since is not None and idling.asked:
        return idling.active_at + (_LEFT_S if idling.waited else _UNASKED_S)
    waited = (times.sleep_s,) if idling.rest == "parked" else (times.park_s, times.sleep_s)
    return min((idling.active_at + each for each in waited if each is not None), default=None)


def woken(idling: Idling, now: float, *, asked: bool) -> Idling:
    """After an order to wake; `asked`: by a frontend, otherwise by the owner. Repeated, it changes no more than the
    time of the last demand. A frontend's order changes nothing while a failed start is not to be repeated."""
    if idling.rest == "awake":
        pending = idling.pending if asked else None
        return replace(idling, active_at=now, pending=pending, asked=idling.asked and asked)
    if asked and idling.failure(now):
        return idling
    return replace(
        idling, rest="awake", why="", active_at=now, waking_since=now, asked=asked, waited=False, may_wake_at=now
    )


def ordered_to_rest(idling: Idling, rest: Rest) -> Idling:
    """After an order to park or to end the workers, which is carried out once no request is under way."""
    order: dict[Rest, int] = {"awake": 0, "parked": 1, "asleep": 2}
    return idling if order[idling.rest] >= order[rest] else replace(idling, pending=rest, waking_since=None)


def yielded(idling: Idling, to: str, now: float) -> Idling:
    """After its devices were given to the endpoint `to`."""
    return Idling("asleep", f"its device was given to {to}", now, idling.served, cause="swap")


def wake_failed(idling: Idling, why: str, now: float, rest: Rest = "asleep") -> Idling:
    """After a start of which nothing came: nobody tries again before somebody asks again, after a pause. `rest`: how
    it is until then."""
    failures = idling.failures + 1
    pause_s = _PAUSES_S[min(failures, len(_PAUSES_S)) - 1]
    may_wake_at = now + pause_s
    return Idling(
        rest,
        "its last start failed",
        now,
        idling.served,
        failures=failures,
        error=why,
        may_wake_at=may_wake_at,
        cause="failure",
    )


def changed(idling: Idling, before: EndpointSpec, after: EndpointSpec, now: float, *, runs_anew: bool) -> Idling:
    """After an update of the endpoint. `runs_anew`: by another revision."""
    idling = replace(idling, failures=0, error="", may_wake_at=now)
    if idling.rest == "asleep":
        return Idling(active_at=now, waking_since=now) if after.min_workers > 0 else idling
    if idling.rest == "parked" and runs_anew:
        # Workers of the new revision would be started to be parked.
        if after.min_workers > 0:
            return replace(idling, rest="awake", why="", active_at=now)
        return replace(idling, rest="asleep", cause="update")
    if times_of(before) != times_of(after):
        return replace(idling, active_at=now)
    return idling


def reason(idling: Idling, now: float) -> str:
    """Why it rests and what wakes it, in a line, or that it is to rest by order; empty for one that is awake."""
    if idling.rest == "awake":
        return "" if idling.pending is None else f"to be {idling.pending} once no request is under way"
    if idling.error:
        return f"the last start failed, a request has it tried again: {idling.error}"
    return f"{idling.why}; a request wakes it"


def in_words(seconds: float) -> str:
    """A time as "90 s", "15 min" or "2 h"."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (seconds >= size and seconds % size == 0):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:g} s"


def _waking(idling: Idling, times: IdleTimes, seen: Activity, now: float) -> Idling:
    if seen.ready:
        return replace(idling, active_at=now, waking_since=None, asked=False, failures=0, error="")
    if seen.busy is not False:
        return replace(idling, active_at=now, waited=idling.waited or bool(seen.busy))
    # What never sleeps, or is kept awake now, would be started again.
    goes_on = not idling.asked or seen.nearly or (seen.begun and times.sleep_s is None)
    if goes_on or now - idling.active_at < _patience_s(idling, seen):
        return idling
    return replace(
        idling, rest="asleep", why="nobody waits for it any more", cause="unasked", waking_since=None, asked=False
    )


def _patience_s(idling: Idling, seen: Activity) -> float:
    if idling.waited:
        return _LEFT_S
    return _REFUSED_S if seen.begun else _UNASKED_S


def _rested(idling: Idling, times: IdleTimes, now: float) -> Idling:
    idle_s = now - idling.active_at
    if times.sleep_s is not None and idling.rest != "asleep" and idle_s >= times.sleep_s:
        return replace(idling, rest="asleep", why=f"no request for {in_words(times.sleep_s)}", cause="idle")
    if times.park_s is not None and idling.rest == "awake" and idle_s >= times.park_s:
        return replace(idling, rest="parked", why=f"no request for {in_words(times.park_s)}", cause="idle")
    return idling
