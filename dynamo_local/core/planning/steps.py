"""Decides on actions at the end of an adjustment interval: turns the proposals of all roles into single workers that
come, go or switch their roles, within the budget and the minimums of the options, in the cheapest way. Pure.

Each role gains or loses at most one worker. Where one role needs a worker and another one can spare one, that worker
switches its role, which takes no device and no start.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.names import short_watcher
from dynamo_local.core.planning.actions import Action, AddWorker, RemoveWorker, SwitchRole
from dynamo_local.core.planning.decision import Decision, Verdict
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.policies import POLICIES
from dynamo_local.core.planning.proposals import Proposal, why_starting
from dynamo_local.core.planning.window import History, RoleWindow, Window, WorkerWindow
from dynamo_local.core.shares import fits, summed

FAILED_INTERVALS = 3
"""Intervals for which a role is left alone after an action that failed. Its cause is likely to persist, and each worker
that dies while it starts costs the others time and memory."""

_SWITCHABLE = frozenset({"decode", PREFILL_ROLE})
"""Roles between which a worker can switch."""


def step(window: Window, history: History, options: PlannerOptions, max_devices: int, taken: float = 0) -> Decision:
    """Decide at the window's end. `taken`: devices of `max_devices` that other endpoints have. The order of the workers
    does not matter."""
    acts = not options.no_operation
    if window.roles is None:
        why = Verdict("all", 0, "hold: statefile or bus cannot be read")
        return Decision(window.ended, options.policy, (why,), (), None, max_devices, acts)
    roles, policy = window.roles.values(), POLICIES[options.policy]
    devices = summed([taken, *(held_by_all(role.workers, options) for role in roles)])
    allocation = _Allocation(options, max_devices - devices)
    proposals = [_RoleProposal(role, policy(role, window, history, options)) for role in roles]
    if options.policy == "dynamo":
        allocation.settle_as_dynamo(proposals)
    else:
        allocation.settle([replace(each, proposal=_restrained(each, history, options)) for each in proposals])
    verdicts = tuple(
        Verdict(each.role.role, each.proposal.wanted, each.proposal.reason, each.proposal.figures)
        for each in sorted(allocation.settled, key=lambda each: each.role.role)
    )
    return Decision(window.ended, options.policy, verdicts, tuple(allocation.actions), devices, max_devices, acts)


@dataclass(frozen=True)
class _RoleProposal:
    """A role and its proposal."""

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

    def settle(self, proposals: Sequence[_RoleProposal]) -> None:
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

    def settle_as_dynamo(self, proposals: Sequence[_RoleProposal]) -> None:
        """Choose the actions in Dynamo's order: what a removal frees may be taken again at once."""
        ordered = sorted(proposals, key=lambda each: (each.role.role != PREFILL_ROLE, each.role.role))
        for each in ordered:
            if each.proposal.wanted < 0:
                self._remove_as_dynamo(each)
        for each in ordered:
            if each.proposal.wanted > 0:
                self._add(each)
            elif each.proposal.wanted == 0:
                self.settled.append(each)

    def _remove_as_dynamo(self, spare: _RoleProposal) -> None:
        victim = max(spare.role.routable, key=lambda worker: worker.rank)
        if _below_minimum(_without(victim, spare.role.routable), self.options) is not None:
            reason = f"{spare.proposal.reason}, but the minimum is reached"
            self.settled.append(replace(spare, proposal=replace(spare.proposal, wanted=0, reason=reason)))
            return
        self.free += held_by(victim, self.options)
        self.actions.append(RemoveWorker(victim.watcher, spare.role.role))
        self.settled.append(spare)

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


def _restrained(each: _RoleProposal, history: History, options: PlannerOptions) -> Proposal:
    """Return the proposal as far as the role's minimum, its starting workers and its last action allow it."""
    role, proposal, staying = each.role, each.proposal, each.role.staying
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


# Counts the devices that workers hold, and those that one more worker takes. Pure.


def held_by(worker: WorkerWindow, options: PlannerOptions) -> float:
    """Return the devices that a worker counts for. One without devices (a mocker, say) counts like any engine of its
    role: otherwise the budget would not limit the number of such workers."""
    return worker.devices or options.devices_of_engine(worker.role)


def held_by_all(workers: Iterable[WorkerWindow], options: PlannerOptions) -> float:
    """Return the devices that these workers count for together."""
    return summed(held_by(worker, options) for worker in workers)


def held_after(window: Window, actions: Iterable[Action], options: PlannerOptions) -> float:
    """Return the devices that the workers count for once these actions have begun: those of workers that are added
    count already, those of workers that end still do."""
    roles = window.roles or {}
    added = (devices_of_one_more(roles[each.role], options) for each in actions if isinstance(each, AddWorker))
    return summed([*(held_by_all(role.workers, options) for role in roles.values()), *added])


def devices_for_minimum(workers: Iterable[WorkerWindow], options: PlannerOptions) -> int:
    """Return the devices that these workers count for where a minimum is to be kept: a worker with a share of a device
    is as good as one with all of it."""
    return sum(math.ceil(held_by(worker, options)) for worker in workers)


def devices_of_one_more(role: RoleWindow, options: PlannerOptions) -> float:
    """Return the devices that one more worker takes. Running workers are right that hold more than the options say, or
    shares."""
    most = max((worker.devices for worker in role.workers), default=0)
    return most if 0 < most < 1 else max(options.devices_of_engine(role.role), most)
