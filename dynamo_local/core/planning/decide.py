"""Turns the proposals of all roles into actions, within the budget and the minimums, in the cheapest way.

Each role gains or loses at most one worker. Where one role needs a worker and another one can spare one, that worker
switches its role, which takes no device and no start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.names import short_watcher
from dynamo_local.core.planning.actions import Action, AddWorker, RemoveWorker, SwitchRole
from dynamo_local.core.planning.decision import Decision, Verdict
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.policies import concurrency, freeness, load
from dynamo_local.core.planning.policies.dynamo import decide_as_dynamo
from dynamo_local.core.planning.proposals import (
    Policy,
    Proposal,
    devices_for_minimum,
    devices_of_one_more,
    held_by_all,
    why_starting,
)
from dynamo_local.core.planning.window import History, RoleWindow, Window, WorkerWindow
from dynamo_local.core.shares import fits, summed

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"load": load.propose, "freeness": freeness.propose, "concurrency": concurrency.propose}
)
"""Policies that propose for each role. Policy `dynamo` is none of them: it makes the whole decision."""

FAILED_INTERVALS = 3
"""Intervals for which a role is left alone after an action that failed. Its cause is likely to persist, and each worker
that dies while it starts costs the others time and memory."""

_SWITCHABLE = frozenset({"decode", PREFILL_ROLE})
"""Roles between which a worker can switch."""


def decide(window: Window, history: History, options: PlannerOptions, now: float) -> Decision:
    """Decide on actions at `now` (CLOCK_MONOTONIC, s). Pure; the order of the workers does not matter."""
    max_devices = options.limits(window.inventory).max_devices
    assert max_devices is not None, "the options have a maximum"
    if window.roles is None:
        why = Verdict("all", 0, "hold: statefile or bus cannot be read")
        return Decision(now, options.policy, (why,), (), None, max_devices, not options.no_operation)
    if options.policy == "dynamo":
        return decide_as_dynamo(tuple(window.roles.values()), window, history, options, now)
    devices = summed([window.taken, *(held_by_all(role.workers, options) for role in window.roles.values())])
    policy = POLICIES[options.policy]
    proposals = [
        _RoleProposal(role, _restrained(role, policy(role, window, history, options), history, options))
        for role in window.roles.values()
    ]
    allocation = _Allocation(options, max_devices - devices)
    allocation.settle(proposals)
    verdicts = tuple(
        Verdict(each.role.role, each.proposal.wanted, each.proposal.reason, each.proposal.figures)
        for each in allocation.settled
    )
    actions = tuple(allocation.actions)
    return Decision(now, options.policy, verdicts, actions, devices, max_devices, not options.no_operation)


@dataclass(frozen=True)
class _RoleProposal:
    """A role and its proposal, once the role's own restraints have been applied."""

    role: RoleWindow
    proposal: Proposal

    def because(self, more: str) -> _RoleProposal:
        return replace(self, proposal=replace(self.proposal, reason=f"{self.proposal.reason}; {more}"))


@dataclass
class _Allocation:
    """Shares the budget among the roles' proposals. `free`: devices that are left of the budget."""

    options: PlannerOptions
    free: float
    actions: list[Action] = field(default_factory=list)
    settled: list[_RoleProposal] = field(default_factory=list)

    def settle(self, proposals: list[_RoleProposal]) -> None:
        """Choose the actions. Decode comes before prefill: a full KV cache stops the requests of both."""
        short = [each for each in proposals if each.proposal.wanted > 0]
        spare = [each for each in proposals if each.proposal.wanted < 0]
        self.settled = [each for each in proposals if each.proposal.wanted == 0]
        for each in short:
            giver = next((other for other in spare if self._can_switch(each, other)), None)
            if giver is not None:
                spare.remove(giver)
                self._switch(each, giver)
            else:
                self._add(each)
        for each in spare:
            self.actions.append(RemoveWorker(_victim(each), each.role.role))
            self.settled.append(each)
        self.settled.sort(key=lambda each: each.role.role)

    def _can_switch(self, short: _RoleProposal, spare: _RoleProposal) -> bool:
        return {short.role.role, spare.role.role} <= _SWITCHABLE and bool(spare.role.routable)

    def _switch(self, short: _RoleProposal, giver: _RoleProposal) -> None:
        watcher = _victim(giver)
        self.actions.append(SwitchRole(watcher, giver.role.role, short.role.role))
        switches = f"{short_watcher(watcher)} {'would switch' if self.options.no_operation else 'switches'}"
        self.settled += [short.because(f"{switches} to it"), giver.because(f"{switches} its role")]

    def _add(self, short: _RoleProposal) -> None:
        role = short.role
        cost = devices_of_one_more(role, self.options)
        if not fits(0, cost, self.free):
            self.settled.append(short.because(f"the budget has {max(self.free, 0):g} devices left, {cost:g} needed"))
            return
        self.free -= cost
        self.actions.append(AddWorker(role.role, role.template))
        self.settled.append(short)


def _restrained(role: RoleWindow, proposal: Proposal, history: History, options: PlannerOptions) -> Proposal:
    """Return the proposal as far as the role's minimum, its starting workers and its last action allow it."""
    staying = role.staying
    if proposal.wanted <= 0 and (below := _below_minimum(staying, options)) is not None:
        proposal = replace(proposal, wanted=1, reason=f"{below} ({proposal.reason})")
    if proposal.wanted and (why := why_starting(role, history)) is not None:
        return replace(proposal, wanted=0, reason=f"{proposal.reason}, but {why}")
    if proposal.wanted and any(role.role in window.failed for window in history[-FAILED_INTERVALS:]):
        return replace(proposal, wanted=0, reason=f"{proposal.reason}, but the last action failed")
    if proposal.wanted < 0:
        leaving = next((worker for worker in staying if worker.watcher == proposal.victim), None) or _last(role)
        if leaving is None or _below_minimum(_without(leaving, staying), options) is not None:
            minimum = max(options.min_gpu_budget, options.min_endpoint)
            return replace(proposal, wanted=0, reason=f"{proposal.reason}, but the minimum is {minimum}")
        return replace(proposal, victim=leaving.watcher)
    return proposal


def _below_minimum(workers: Collection[WorkerWindow], options: PlannerOptions) -> str | None:
    """Return which minimum the workers of a role fall short of, or None."""
    held = devices_for_minimum(workers, options)
    if held < options.min_gpu_budget:
        return f"{held} devices, minimum {options.min_gpu_budget}"
    if len(workers) < options.min_endpoint:
        return f"{len(workers)} workers, minimum {options.min_endpoint}"
    return None


def _without(leaving: WorkerWindow, workers: Collection[WorkerWindow]) -> list[WorkerWindow]:
    return [worker for worker in workers if worker is not leaving]


def _last(role: RoleWindow) -> WorkerWindow | None:
    return max(role.routable, key=lambda worker: worker.rank, default=None)


def _victim(spare: _RoleProposal) -> str:
    assert spare.proposal.victim is not None, "a restrained proposal for one worker less names the worker"
    return spare.proposal.victim
