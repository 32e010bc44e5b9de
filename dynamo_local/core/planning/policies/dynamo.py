"""Policy `dynamo`: the rules of NVIDIA Dynamo's local planner (v0.2 and v0.3), and none of ours.

Source: https://github.com/ai-dynamo/dynamo, docs/guides/planner.md and examples/llm/components/planner.py. Unlike the
other policies this one makes the whole decision, because Dynamo's order of changes is part of its rules: removals, then
additions, each for prefill before decode, and what a removal frees may be taken again at once. No worker switches its
role, a role below its minimum gets no worker, and a worker that starts or an action that failed holds nothing up.

Two restraints remain, since they are no rules of scaling: the budget counts the devices of workers that start or leave,
and no worker is removed while the load of one of its role is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.planning.actions import Action, AddWorker, RemoveWorker
from dynamo_local.core.planning.decision import Decision, Verdict
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.policies.load import (
    NEW_DECODE_WORKER_GRACE_PERIOD,
    NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD,
)
from dynamo_local.core.planning.proposals import (
    Proposal,
    devices_for_minimum,
    devices_of_one_more,
    held_by,
    held_by_all,
    unread,
)
from dynamo_local.core.planning.window import History, QueueWindow, RoleWindow, Window, mean
from dynamo_local.core.shares import fits, summed

KV_OF_A_WAITING_REQUEST = 0.02
"""Share of a worker's KV cache that each of its waiting requests counts for."""


def kv_load(kv_usage: float, waiting: float) -> float:
    """Return the load of a decode worker: its KV usage, 0 to 1, and a share for each waiting request. May exceed 1."""
    return kv_usage + KV_OF_A_WAITING_REQUEST * waiting


def decide_as_dynamo(
    roles: tuple[RoleWindow, ...], window: Window, history: History, options: PlannerOptions, now: float
) -> Decision:
    """Decide as Dynamo's planner would. `roles`: those of the window, in any order. Pure."""
    max_devices = options.limits(window.inventory).max_devices
    assert max_devices is not None, "the options have a maximum"
    devices = summed([window.taken, *(held_by_all(role.workers, options) for role in roles)])
    adjustment = _Adjustment(options, max_devices - devices)
    changed = _changed(roles)
    ordered = sorted(roles, key=lambda role: (role.role != PREFILL_ROLE, role.role))
    proposals = [
        (role, _propose(role, window, history, options) if changed is None else Proposal(0, f"hold: {changed}"))
        for role in ordered
    ]
    for role, proposal in proposals:
        if proposal.wanted < 0:
            adjustment.remove(role, proposal)
    for role, proposal in proposals:
        if proposal.wanted > 0:
            adjustment.add(role, proposal)
        elif proposal.wanted == 0:
            adjustment.say(role, proposal)
    verdicts = tuple(sorted(adjustment.verdicts, key=lambda verdict: verdict.role))
    return Decision(
        now, options.policy, verdicts, tuple(adjustment.actions), devices, max_devices, not options.no_operation
    )


@dataclass
class _Adjustment:
    """The actions of one decision. `free`: devices that are left of the budget."""

    options: PlannerOptions
    free: float
    actions: list[Action] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def remove(self, role: RoleWindow, proposal: Proposal) -> None:
        victim = max(role.routable, key=lambda worker: worker.rank)
        stay = [worker for worker in role.routable if worker is not victim]
        devices = devices_for_minimum(stay, self.options)
        if len(stay) < self.options.min_endpoint or devices < self.options.min_gpu_budget:
            self.say(role, replace(proposal, wanted=0, reason=f"{proposal.reason}, but the minimum is reached"))
            return
        self.free += held_by(victim, self.options)
        self.actions.append(RemoveWorker(victim.watcher, role.role))
        self.say(role, proposal)

    def add(self, role: RoleWindow, proposal: Proposal) -> None:
        cost = devices_of_one_more(role, self.options)
        if not fits(0, cost, self.free):
            why = f"the budget has {max(self.free, 0):g} devices left, {cost:g} needed"
            self.say(role, replace(proposal, reason=f"{proposal.reason}; {why}"))
            return
        self.free -= cost
        self.actions.append(AddWorker(role.role, role.template))
        self.say(role, proposal)

    def say(self, role: RoleWindow, proposal: Proposal) -> None:
        self.verdicts.append(Verdict(role.role, proposal.wanted, proposal.reason, proposal.figures))


def _changed(roles: tuple[RoleWindow, ...]) -> str | None:
    """Return which number of workers is another one than at the interval's start, or None. The means of such an
    interval are of two fleets."""
    for role in roles:
        if role.began_with is None:
            return f"the number of {role.role} workers at the interval's start is not known"
        if role.began_with != len(role.routable):
            return f"there were {role.began_with} {role.role} workers at the interval's start, now {len(role.routable)}"
    return None


def _propose(role: RoleWindow, window: Window, history: History, options: PlannerOptions) -> Proposal:
    if role.role == PREFILL_ROLE:
        return _propose_prefill(role, window.queue, options)
    return _propose_decode(role, history, options)


def _propose_decode(role: RoleWindow, history: History, options: PlannerOptions) -> Proposal:
    load = mean(
        None if worker.kv_usage is None or worker.waiting is None else kv_load(worker.kv_usage, worker.waiting)
        for worker in role.known
    )
    figures = {"kv_load": load, "kv_usage": role.kv_usage, "waiting": role.waiting}
    if load is None:
        return Proposal(0, f"hold: {unread(role)}", figures)
    up, down = options.decode_kv_scale_up_threshold, options.decode_kv_scale_down_threshold
    if load > up:
        return Proposal(1, f"KV load {load:.2f} is above {up:g}", figures)
    if load >= down:
        return Proposal(0, f"KV load {load:.2f} is between {down:g} and {up:g}", figures)
    low = f"KV load {load:.2f} is below {down:g}"
    if any(role.role in then.added for then in history[-NEW_DECODE_WORKER_GRACE_PERIOD:]):
        grace = f"less than {NEW_DECODE_WORKER_GRACE_PERIOD} intervals have passed since one was added"
        return Proposal(0, f"{low}, but {grace}", figures)
    return _fewer(role, low, figures)


def _propose_prefill(role: RoleWindow, queue: QueueWindow | None, options: PlannerOptions) -> Proposal:
    if queue is None:
        return Proposal(0, "hold: the prefill queue cannot be read", {"queue": None})
    # The whole queue counts, and not what waits for each worker as in policy `load`.
    later = queue.last + NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD * (queue.last - queue.first)
    figures: dict[str, float | None] = {"queue": queue.mean, "queue_later": float(later)}
    up, down = options.prefill_queue_scale_up_threshold, options.prefill_queue_scale_down_threshold
    jobs = f"{queue.mean:.2f} jobs wait"
    if queue.mean > up:
        if later <= up:
            soon = f"in {NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD} intervals it will be {max(later, 0)}"
            return Proposal(0, f"{jobs}, above {up:g}, but {soon}", figures)
        return Proposal(1, f"{jobs}, above {up:g}", figures)
    if queue.mean >= down:
        return Proposal(0, f"{jobs}, between {down:g} and {up:g}", figures)
    return _fewer(role, f"{jobs}, below {down:g}", figures)


def _fewer(role: RoleWindow, reason: str, figures: dict[str, float | None]) -> Proposal:
    if (why := unread(role)) is not None:
        return Proposal(0, f"{reason}, but {why}", figures)
    return Proposal(-1, reason, figures)
