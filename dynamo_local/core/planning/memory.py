"""What is remembered of an endpoint from pull to pull, and the number of workers that its policy asks for. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.fleet.view import AGGREGATED_ROLE, DECODE_ROLE, PREFILL_ROLE
from dynamo_local.core.planning.actions import ActionOutcome, AddWorker, roles_of
from dynamo_local.core.planning.decision import Verdict
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.policies import POLICIES
from dynamo_local.core.planning.proposals import Policy, Proposal, why_starting
from dynamo_local.core.planning.window import EndpointSeen, Fleet, History, RoleWindow, Window, aggregate, remember

# What the planner remembers of an endpoint from pull to pull. Pure.

_PULLS_IN_A_GAP = 3


@dataclass(frozen=True)
class Proposed:
    """What a policy proposed for a role at the end of the last interval, when so many workers were ordered."""

    ordered: int
    proposal: Proposal

    @property
    def wanted(self) -> int:
        return self.ordered + self.proposal.wanted

    def holds(self, ordered: int) -> bool:
        """Whether the proposal still applies: the number is neither the planner's nor the one before otherwise."""
        return min(self.ordered, self.wanted) <= ordered <= max(self.ordered, self.wanted)


@dataclass(frozen=True)
class Told:
    """The answer to the last order: the numbers by role that the server brings the endpoint to. It holds until the
    server shows another board than the one of number `board`."""

    board: int
    ordered: Mapping[str, int]


@dataclass(frozen=True)
class Memory:
    """An endpoint's past. `pulls`: those of the present interval; `history`: earlier intervals.

    `refused_until`: the last order was refused or not answered, and the endpoint is left alone until then
    (CLOCK_MONOTONIC, s). `under_way`: devices that its workers count for while actions on them are under way, those of
    workers that are added included. Meanwhile no pull counts: workers that come and go make the metrics meaningless.
    """

    demands: Mapping[str, Demand] = field(default_factory=dict)
    pulls: tuple[Fleet, ...] = ()
    history: History = ()
    proposed: Mapping[str, Proposed] = field(default_factory=dict)
    told: Told | None = None
    refused_until: float | None = None
    under_way: float | None = None

    def read(self, seen: EndpointSeen, options: PlannerOptions) -> Memory:
        """Add the demand of a pull."""
        gap_s = max(GAP_S, _PULLS_IN_A_GAP * options.metric_pulling_interval)
        window_s = options.endpoint_concurrency_window
        demands = {
            role: self.demand(role).read(seen.fleet.at, seen.demand(role), window_s, gap_s) for role in seen.roles
        }
        return replace(self, demands=demands)

    def demand(self, role: str) -> Demand:
        return self.demands.get(role, Demand())

    def pulled(self, fleet: Fleet, options: PlannerOptions) -> tuple[Memory, Window | None]:
        """Add a pull to the present interval. Returns the interval's window too if it ends with this pull."""
        pulls = (*self.pulls, fleet)
        if fleet.at - pulls[0].at < options.adjustment_interval:
            return replace(self, pulls=pulls), None
        window = aggregate(pulls)
        return replace(self, pulls=(), history=remember(self.history, window, options)), window

    def without_proposals(self) -> Memory:
        """Forget the present interval and the proposals of the last one."""
        return replace(self, pulls=(), proposed={})

    def ordered(self, seen: EndpointSeen, role: str, board: int) -> int:
        """Number of workers that the server was told to run: by its answer until it shows a newer board."""
        if self.told is not None and self.told.board == board:
            return self.told.ordered.get(role, seen.ordered(role))
        return seen.ordered(role)

    def answered(self, board: int, workers: int, prefill_workers: int) -> Memory:
        """Note the numbers of the server's answer to an order, which followed the board of this number."""
        ordered = {PREFILL_ROLE: prefill_workers, DECODE_ROLE: workers, AGGREGATED_ROLE: workers}
        return replace(self, told=Told(board, ordered))

    def refused(self, until: float) -> Memory:
        """Note that an order was refused or not answered."""
        return replace(self, refused_until=until)

    def added(self, roles: Iterable[str], failed: Iterable[str] = ()) -> Memory:
        """Note to which roles a worker was added at the end of the last interval, and in which an action failed."""
        last = replace(self.history[-1], added=frozenset(roles), failed=frozenset(failed))
        return replace(self, history=(*self.history[:-1], last))

    def acted(self, outcomes: Sequence[ActionOutcome]) -> Memory:
        """Note that the actions at the end of the last interval are over."""
        failed = {role for outcome in outcomes if not outcome.done for role in roles_of(outcome.action)}
        added = {each.action.role for each in outcomes if each.done and isinstance(each.action, AddWorker)}
        return replace(self.added(added, failed), under_way=None)


# The highest demand within a window of time, and for how long it has been watched. Pure.

GAP_S = 10.0
"""Time without a known demand, in seconds, after which the window begins anew: what came meanwhile is not known."""


@dataclass(frozen=True)
class Demand:
    """Demand as it was read, pull by pull. Times are CLOCK_MONOTONIC, in seconds.

    `peaks`: (time, number) of the readings that may still be the highest of a window, oldest and highest first.
    `now`: the last reading, None if it could not be made. `since`: time of the first reading without a later gap.
    `until`: time of the last reading.
    """

    peaks: tuple[tuple[float, float], ...] = ()
    now: float | None = None
    since: float | None = None
    until: float | None = None

    def read(self, at: float, number: float | None, window_s: float, gap_s: float = GAP_S) -> Demand:
        """Add a reading. Times never decrease. `gap_s`: as GAP_S, where pulls are rarer than that."""
        if number is None:
            return replace(self, now=None)
        higher = tuple(peak for peak in self.peaks if peak[1] > number and peak[0] >= at - window_s)
        watched = self.since is not None and self.until is not None and at - self.until <= gap_s
        return Demand((*higher, (at, number)), number, self.since if watched else at, at)

    @property
    def most(self) -> float | None:
        """The highest reading of the window that ends with the last one; None if that could not be made."""
        return None if self.now is None else self.peaks[0][1]

    @property
    def watched_s(self) -> float:
        """Time for which the demand is known without a gap, in seconds."""
        return 0.0 if self.since is None or self.until is None else self.until - self.since


# The number of workers that an endpoint's policy asks for in each role, whatever there is room for. Pure.

_ROUNDING = 1e-9
"""Quotients this close above a whole number are that number."""


def wants_of(
    seen: EndpointSeen, memory: Memory, ordered: Mapping[str, int], options: PlannerOptions
) -> tuple[dict[str, Verdict], Memory]:
    """Return what the policy wants for each role, within the endpoint's bounds, and the memory with this pull added.

    `ordered`: by role, the number of workers that the server was told to run.
    """
    memory = memory.read(seen, options)
    if seen.spec.policy == "concurrency":
        # Names a number at every pull. The others propose one worker more or less at the end of each interval.
        memory = memory.without_proposals()
        wants = {role: _by_concurrency(seen, role, memory, ordered[role], options) for role in ordered}
    else:
        memory = _proposed(seen, memory, ordered, options)
        wants = {role: _stepwise(role, memory.proposed.get(role), ordered[role]) for role in ordered}
    return {role: _bounded(want, *bounds_of(seen.spec, role)) for role, want in wants.items()}, memory


def bounds_of(spec: EndpointSpec, role: str) -> tuple[int, int]:
    """Lowest and highest number of workers in that role. Whether there is any worker is not the planner's to decide."""
    if role == PREFILL_ROLE:
        return spec.min_prefill_workers, spec.most_prefill_workers
    return spec.least_awake, spec.most_workers


def _by_concurrency(seen: EndpointSeen, role: str, memory: Memory, ordered: int, options: PlannerOptions) -> Verdict:
    prefill = role == PREFILL_ROLE
    demand, window_s = memory.demand(role), options.endpoint_concurrency_window
    figures: dict[str, float | None] = {"in_flight": demand.now, "most_in_flight": demand.most}
    if demand.most is None:
        what = "the prefill queue" if prefill else "the number of requests in flight"
        return Verdict(role, ordered, f"hold: {what} cannot be read", figures)
    per_worker = options.prefill_requests_per_worker if prefill else seen.spec.requests_per_worker
    needed = math.ceil(demand.most / per_worker - _ROUNDING)
    what = "jobs in flight" if prefill else "requests in flight"
    if seen.queued and not prefill:
        what = "requests in flight and tasks queued"
    reason = f"at most {demand.most:g} {what} in {window_s:g} s, {per_worker:g} per worker"
    if needed < ordered and demand.watched_s < window_s:
        return Verdict(
            role, ordered, f"{reason}, but they have been watched for {demand.watched_s:.0f} s only", figures
        )
    return Verdict(role, needed, reason, figures)


def _stepwise(role: str, proposed: Proposed | None, ordered: int) -> Verdict:
    if proposed is None or not proposed.holds(ordered):
        return Verdict(role, ordered, "hold: these workers have not been watched for an interval")
    return Verdict(role, proposed.wanted, proposed.proposal.reason, proposed.proposal.figures)


def _proposed(seen: EndpointSeen, memory: Memory, ordered: Mapping[str, int], options: PlannerOptions) -> Memory:
    """Return the memory with this pull, and with new proposals if an interval ends with it."""
    if memory.history and memory.proposed:
        grown = [role for role, last in memory.proposed.items() if ordered.get(role, 0) > last.ordered]
        memory = memory.added(grown)
    history, policy = memory.history, POLICIES[seen.spec.policy]
    memory, window = memory.pulled(seen.fleet, options)
    if window is None:
        return memory
    found = {
        role: Proposed(ordered[role], _proposal(policy, window.role(role), window, history, options))
        for role in ordered
    }
    return replace(memory, proposed=found)


def _proposal(
    policy: Policy, role: RoleWindow | None, window: Window, history: History, options: PlannerOptions
) -> Proposal:
    if role is None:
        return Proposal(0, "hold: statefile or bus cannot be read")
    proposal = policy(role, window, history, options)
    if proposal.wanted and (why := why_starting(role, history)) is not None:
        return replace(proposal, wanted=0, reason=f"{proposal.reason}, but {why}")
    return proposal


def _bounded(want: Verdict, lowest: int, highest: int) -> Verdict:
    if want.wanted < lowest:
        return replace(want, wanted=lowest, reason=f"{want.reason}; the minimum is {lowest}")
    if want.wanted > highest:
        needed = f"{want.wanted} needed, the maximum is {highest}"
        return replace(want, wanted=highest, reason=f"{want.reason}; {needed}")
    return want
