"""Policy `dynamo`: the rules of NVIDIA Dynamo's local planner (v0.2 and v0.3), and none of ours.

Source: https://github.com/ai-dynamo/dynamo, docs/guides/planner.md and examples/llm/components/planner.py. The order of
the changes is part of its rules, and made in ../steps.py: removals, then additions, each for prefill before decode, and
what a removal frees may be taken again at once. No worker switches its role, a role below its minimum gets no worker,
and a worker that starts or an action that failed holds nothing up. That is so for the graph's own workers; those of
another endpoint stay within its bounds, and a worker that starts holds the next one up.

Two restraints remain, since they are no rules of scaling: the budget counts the devices of workers that start or leave,
and no worker is removed while the load of one of its role is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.policies.load import (
    NEW_DECODE_WORKER_GRACE_PERIOD,
    NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD,
)
from dynamo_local.core.planning.proposals import Proposal, unread
from dynamo_local.core.planning.window import History, QueueWindow, RoleWindow, Window, mean

KV_OF_A_WAITING_REQUEST = 0.02
"""Share of a worker's KV cache that each of its waiting requests counts for."""


def kv_load(kv_usage: float, waiting: float) -> float:
    """Return the load of a decode worker: its KV usage, 0 to 1, and a share for each waiting request. May exceed 1."""
    return kv_usage + KV_OF_A_WAITING_REQUEST * waiting


def propose(role: RoleWindow, window: Window, history: History, options: PlannerOptions) -> Proposal:
    """Propose by KV load for decode and aggregated workers, by the prefill queue for prefill workers."""
    if (changed := _changed((window.roles or {}).values())) is not None:
        return Proposal(0, f"hold: {changed}")
    if role.role == PREFILL_ROLE:
        return _propose_prefill(role, window.queue, options)
    return _propose_decode(role, history, options)


def _changed(roles: Iterable[RoleWindow]) -> str | None:
    """Return which number of workers is another one than at the interval's start, or None. The means of such an
    interval are of two fleets."""
    for role in roles:
        if role.began_with is None:
            return f"the number of {role.role} workers at the interval's start is not known"
        if role.began_with != len(role.routable):
            return f"there were {role.began_with} {role.role} workers at the interval's start, now {len(role.routable)}"
    return None


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
