"""Whether an endpoint is to be awake: its idle clock, the orders to park and to wake, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_local.core.endpoints.awake import idling
from dynamo_local.core.endpoints.awake.idling import Activity, IdleTimes, Idling, Rest, WakeCause
from dynamo_local.core.endpoints.checks import runs_differently
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.messages.events import Event
from dynamo_local.supervisor.endpoints.awake.keeping import Kept


@dataclass
class Idleness:
    """The idle clock of one endpoint. `record`: notes what is done to it."""

    spec: EndpointSpec
    clock: Callable[[], float]
    record: Callable[[Event], None]
    kept: Kept = field(default_factory=Kept)
    """Whether it stays awake without a request."""
    state: Idling = field(init=False)
    _cause: WakeCause = field(default="request", init=False)
    """What it was woken by last."""

    def __post_init__(self) -> None:
        self.state = idling.at_start(self.spec, self.clock())

    @property
    def rest(self) -> Rest:
        return self.state.rest

    @property
    def is_waking(self) -> bool:
        """Whether it rested, and no worker is ready since."""
        return self.state.waking_since is not None

    @property
    def failure(self) -> str:
        """Why no request has it started now; empty if one does."""
        return self.state.failure(self.clock())

    @property
    def reason(self) -> str:
        """Why it rests, in words."""
        reason, at = idling.reason(self.state, self.clock()), self.kept.next_at
        return f"{reason}; its schedule does on {at:%A at %H:%M}" if reason and at and not self.kept.awake else reason

    def wake(self, *, asked: bool, kept: Kept | None = None) -> bool:
        """Have it awake; returns whether it was not to be. `kept`: what has it awake without an order. Raises
        SupervisorError to a frontend (`asked`) while a start that has failed is not to be repeated."""
        now, rested = self.clock(), self.state.rest
        if asked and (failure := self.failure):
            raise SupervisorError(
                f"endpoint {self.spec.name} could not be started: {failure}",
                f"a request tries it again in {self.state.may_wake_at - now:.0f} s",
            )
        self.state = idling.woken(self.state, now, asked=asked)
        if rested != "awake":
            self._note_wake(*_woken_by(kept, asked=asked), rested)
        return rested != "awake"

    def order_rest(self, rest: Rest) -> None:
        """Park it, or have it sleep, once no request is under way."""
        self.state = idling.ordered_to_rest(self.state, rest)

    def yield_to(self, other: str) -> None:
        """Have it sleep now: its devices go to the endpoint `other`."""
        self.state = idling.yielded(self.state, other, self.clock())

    def update(self, spec: EndpointSpec) -> None:
        """Follow an update of the endpoint."""
        before, self.spec = self.spec, spec
        anew, rested = runs_differently(before, spec), self.state.rest
        self.state = idling.changed(self.state, before, spec, self.clock(), runs_anew=anew)
        if rested != "awake" and self.state.rest == "awake":
            self._note_wake("update", "woken by an update", rested)

    def look(self, seen: Activity) -> None:
        """Have it rest if it is not used."""
        since, now = self.state.waking_since, self.clock()
        self.state = idling.looked(self.state, self._times, seen, now)
        if since is not None and self.state.waking_since is None and self.state.rest == "awake":
            took_s = round(now - since, 3)
            what = f"awake after {took_s:.2f} s"
            self.record(Event("wake", what, endpoint=self.spec.name, cause=self._cause, took_s=took_s))

    def fail(self, why: str, rest: Rest = "asleep") -> None:
        """Have it rest because it cannot be started."""
        self.state = idling.wake_failed(self.state, why, self.clock(), rest)

    def look_in_s(self, every_s: float) -> float:
        """Time until another look is due, in seconds, at most `every_s`."""
        at, now = idling.look_at(self.state, self._times), self.clock()
        return every_s if at is None or at <= now else min(every_s, at - now)

    def _note_wake(self, cause: WakeCause, what: str, rested: Rest) -> None:
        self._cause = cause
        self.record(Event("wake", what, f"it was {rested}", endpoint=self.spec.name, cause=cause))

    @property
    def _times(self) -> IdleTimes:
        return IdleTimes(None, None) if self.kept.awake else idling.times_of(self.spec)


def _woken_by(kept: Kept | None, *, asked: bool) -> tuple[WakeCause, str]:
    """What an endpoint is woken by, in a word and in words."""
    if kept is None:
        return ("request", "woken by a request") if asked else ("order", "woken by order")
    return kept.cause, f"woken: {kept.awake}" if kept.awake else "woken: by its schedule"
