"""Turns the proposals of all roles into actions, within the budget and the minimums, in the cheapest way.

Each role gains or loses at most one worker. Where one role needs a worker and another one can spare one, that worker
switches its role, which takes no device and no start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.planning.actions import Action, AddWorker, RemoveWorker, SwitchRole
from dynamo_local.core.planning.decision import Decision, Verdict
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.policies import concurrency, freeness, load
from dynamo_local.core.planning.proposals import Policy, Proposal
from dynamo_local.core.planning.window import History, RoleWindow, Window, WorkerWindow

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"load": load.propose, "freeness": freeness.propose, "concurrency": concurrency.propose}
)

STARTING_INTERVALS = 3
"""Intervals for which a role with a starting worker is left alone. No longer, since a worker may die at each start."""

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
        return Decision(now, options.policy, (why,), (), None, max_devices)
    devices = sum(_devices(role, options) for role in window.roles.values())
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
    return Decision(now, options.policy, verdicts, tuple(allocation.actions), devices, max_devices)


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
    free: int
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
        self.settled += [short.because(f"{watcher} switches to it"), giver.because("one switches its role")]

    def _add(self, short: _RoleProposal) -> None:
        role = short.role
        cost = _engine_devices(role, self.options)
        if cost > self.free:
            self.settled.append(short.because(f"the budget has {max(self.free, 0)} devices left, {cost} needed"))
            return
        self.free -= cost
        self.actions.append(AddWorker(role.role, role.template))
        self.settled.append(short)


def _restrained(role: RoleWindow, proposal: Proposal, history: History, options: PlannerOptions) -> Proposal:
    """Return the proposal as far as the role's minimum, its starting workers and its last action allow it."""
    staying, minimum = role.staying, options.min_gpu_budget
    held = sum(_held(worker.devices, role, options) for worker in staying)
    if held < minimum and proposal.wanted <= 0:
        proposal = replace(proposal, wanted=1, reason=f"{held} devices, minimum {minimum} ({proposal.reason})")
    if proposal.wanted and role.starting and not _starts_for_long(role, history):
        names = ", ".join(worker.watcher for worker in role.starting)
        return replace(proposal, wanted=0, reason=f"{proposal.reason}, but {names} is starting")
    if proposal.wanted and any(role.role in window.failed for window in history[-FAILED_INTERVALS:]):
        return replace(proposal, wanted=0, reason=f"{proposal.reason}, but the last action failed")
    if proposal.wanted < 0:
        leaving = next((worker for worker in staying if worker.watcher == proposal.victim), None) or _last(role)
        if leaving is None or held - _held(leaving.devices, role, options) < minimum:
            return replace(proposal, wanted=0, reason=f"{proposal.reason}, but the minimum is {minimum}")
        return replace(proposal, victim=leaving.watcher)
    return proposal


def _last(role: RoleWindow) -> WorkerWindow | None:
    return max(role.routable, key=lambda worker: worker.rank, default=None)


def _victim(spare: _RoleProposal) -> str:
    assert spare.proposal.victim is not None, "a restrained proposal for one worker less names the worker"
    return spare.proposal.victim


def _starts_for_long(role: RoleWindow, history: History) -> bool:
    before = [window.role(role.role) for window in history[-STARTING_INTERVALS:]]
    return len(before) == STARTING_INTERVALS and all(then is not None and bool(then.starting) for then in before)


def _devices(role: RoleWindow, options: PlannerOptions) -> int:
    return sum(_held(worker.devices, role, options) for worker in role.workers)


def _held(devices: int, role: RoleWindow, options: PlannerOptions) -> int:
    """Return the devices that a worker counts for. One without devices (a mocker, say) counts like any engine of its
    role: otherwise the budget would not limit the number of such workers."""
    return devices or options.devices_of_engine(role.role)


def _engine_devices(role: RoleWindow, options: PlannerOptions) -> int:
    """Return the devices that one more worker takes. Running workers that hold more than the options say are right."""
    return max([options.devices_of_engine(role.role), *(worker.devices for worker in role.workers)])
