"""The planner's report to all listeners."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import Message


class RoleReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The workers of a role as the planner observes them. `usage`: mean KV usage of those with a known load, 0 to 1."""

    role: str
    routable: int
    starting: int = 0
    retiring: int = 0
    parked: int = 0
    running: int | None = None
    waiting: int | None = None
    usage: float | None = None


class EndpointReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """An endpoint's workers of one role as the planner observes them. None: the value could not be read.

    `ordered`: their number as the server was told. `ready`: those that take requests. `in_flight`: requests that are
    not finished; jobs for prefill workers. `wanted`: what the endpoint's policy asks for, and `share`: what it gets of
    the budget; None if the number is fixed or the server is changing it. `parked`: workers that are parked; `state`:
    that of the endpoint.
    """

    endpoint: str
    role: str
    ordered: int
    ready: int | None = None
    in_flight: int | None = None
    wanted: int | None = None
    share: int | None = None
    parked: int = 0
    state: str = ""


class DecisionReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision, and the outcomes of its actions. `time` and `since` are Unix time, in seconds.

    Decisions in a row without an outcome that differ in their figures alone are one report: the last of them, made at
    `time`, with their number and the time of the first.
    """

    time: float
    text: str
    outcomes: tuple[str, ...] = ()
    times: int = 1
    since: float | None = None
    """Time of the first of several decisions; None if there is only one."""

    @property
    def began(self) -> float:
        """Time of the first decision."""
        return self.time if self.since is None else self.since


class PlannerReport(Message, frozen=True, omit_defaults=True):
    """The planner's observation and decisions, sent after each turn of its loop. None: the value could not be read."""

    watcher: str
    """Watcher of the planner; empty if the planner is no service of the graph."""
    policy: str
    acts: bool
    """Whether the planner applies its decisions, or only observes."""
    roles: tuple[RoleReport, ...]
    devices: float | None
    max_devices: int
    queue_waiting: int | None = None
    queue_in_hand: int | None = None
    changing: str | None = None
    """The action under way. Meanwhile the planner observes nothing."""
    decisions: tuple[DecisionReport, ...] = ()
    """The last decisions, the newest last."""
    endpoints: tuple[EndpointReport, ...] = ()
    """By endpoint, the oldest first, and role."""
