"""The decision about one endpoint at a pull: its order and its reasons. Plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.events import Event

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class ScaleEndpoint:
    """Order for so many workers now, within the endpoint's bounds. None: as many as before."""

    name: str
    workers: int | None = None
    prefill_workers: int | None = None


@dataclass(frozen=True)
class RoleVerdict:
    """The result for the workers of one role.

    `ordered`: their number before this decision. `wanted`: what the policy asks for. `gets`: its share of the budget.
    `order`: the number to run now, more than `ordered` only as far as devices are free. `ready`: workers that take
    requests. `reason` is a sentence with numbers; `figures` gives the same numbers by name. None: unknown.
    """

    role: str
    ordered: int
    wanted: int
    gets: int
    order: int
    ready: int | None
    reason: str
    figures: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def change(self) -> str:
        """The change in words, such as "4 prefill workers instead of 1"; empty if there is none."""
        if self.order == self.ordered:
            return ""
        workers = "worker" if self.order == 1 else "workers"
        kind = f"{PREFILL_ROLE} " if self.role == PREFILL_ROLE else ""
        return f"{self.order} {kind}{workers} instead of {self.ordered}"


@dataclass(frozen=True)
class EndpointDecision:
    """The verdicts of an endpoint's roles and the order that follows from them.

    `at` is CLOCK_MONOTONIC, in seconds. `devices`: held by all workers of the server (None: unknown), of at most
    `max_devices`. `acts`: whether the order is given; a planner that only observes would give it.
    """

    at: float
    endpoint: str
    policy: str
    verdicts: tuple[RoleVerdict, ...]
    devices: float | None
    max_devices: int
    acts: bool = True

    @property
    def order(self) -> ScaleEndpoint | None:
        """The order to the server; None if the numbers stay as they are."""
        changed = {each.role: each.order for each in self.verdicts if each.order != each.ordered}
        if not changed:
            return None
        prefill = changed.pop(PREFILL_ROLE, None)
        return ScaleEndpoint(self.endpoint, next(iter(changed.values()), None), prefill)

    @property
    def change(self) -> str:
        """The change in words: "chat: 4 workers instead of 2", with "would have" if the planner only observes."""
        changes = ", ".join(each.change for each in self.verdicts if each.change)
        would = "" if self.acts else "would have "
        return f"{self.endpoint}: {would}{changes}" if changes else f"{self.endpoint}: no change"

    @property
    def reasons(self) -> str:
        """The reasons in one line, by role if there are several."""
        if len(self.verdicts) == 1:
            return self.verdicts[0].reason
        return "; ".join(f"{each.role}: {each.reason}" for each in self.verdicts)

    @property
    def text(self) -> str:
        """Change and reasons in one line."""
        return f"{self.change} ({self.reasons})"

    @property
    def gist(self) -> tuple[str, ...]:
        """The decision without the numbers in its reasons, by which a repeated decision is recognised."""
        return self.change, *(f"{each.role} {each.gets} {_NUMBER.sub('#', each.reason)}" for each in self.verdicts)


@dataclass(frozen=True)
class OrderOutcome:
    """What became of an order. Not done: the server refused it or did not answer, and `note` says why."""

    done: bool
    note: str = ""


def event_of(decision: EndpointDecision, outcome: OrderOutcome | None) -> Event:
    """Return the event of a decision with an order. `outcome` is None if the planner only observes."""
    if outcome is None:
        return Event("planner", decision.change, decision.reasons)
    what = decision.change if outcome.done else f"not done: {decision.change}: {outcome.note}"
    return Event("scale", what, f"planner: {decision.reasons}")
