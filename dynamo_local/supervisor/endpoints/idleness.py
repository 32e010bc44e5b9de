"""Whether an endpoint is to be awake: its idle clock, the orders to park and to wake, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_local.core.endpoints import idling
from dynamo_local.core.endpoints.checks import runs_differently
from dynamo_local.core.endpoints.idling import Activity, IdleTimes, Idling, Rest
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import SupervisorError
from dynamo_local.supervisor.endpoints.keeping import Kept


@dataclass
class Idleness:
    """The idle clock of one endpoint. `happened(what, why)`: for the event log and the terminal."""

    spec: EndpointSpec
    clock: Callable[[], float]
    happened: Callable[[str, str], None]
    kept: Kept = field(default_factory=Kept)
    """Whether it stays awake without a request."""
    state: Idling = field(init=False)

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

    def wake(self, *, asked: bool, why: str = "") -> bool:
        """Have it awake; returns whether it was not to be. `why`: if nobody ordered it. Raises SupervisorError to a
        frontend (`asked`) while a start that has failed is not to be repeated."""
        now, rested = self.clock(), self.state.rest
        if asked and (failure := self.failure):
            raise SupervisorError(
                f"endpoint {self.spec.name} could not be started: {failure}",
                f"a request tries it again in {self.state.may_wake_at - now:.0f} s",
            )
        self.state = idling.woken(self.state, now, asked=asked)
        if rested != "awake":
            by = "woken by a request" if asked else "woken by order"
            self.happened(f"woken: {why}" if why else by, f"it was {rested}")
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
        anew = runs_differently(before, spec)
        self.state = idling.changed(self.state, before, spec, self.clock(), runs_anew=anew)

    def look(self, seen: Activity) -> None:
        """Have it rest if it is not used."""
        since, now = self.state.waking_since, self.clock()
        self.state = idling.looked(self.state, self._times, seen, now)
        if since is not None and self.state.waking_since is None and self.state.rest == "awake":
            self.happened(f"awake after {now - since:.2f} s", "")

    def fail(self, why: str) -> None:
        """Have it sleep because it cannot be started."""
        self.state = idling.wake_failed(self.state, why, self.clock())

    def look_in_s(self, every_s: float) -> float:
        """Time until another look is due, in seconds, at most `every_s`."""
        at, now = idling.look_at(self.state, self._times), self.clock()
        return every_s if at is None or at <= now else min(every_s, at - now)

    @property
    def _times(self) -> IdleTimes:
        return IdleTimes(None, None) if self.kept.awake else idling.times_of(self.spec)
