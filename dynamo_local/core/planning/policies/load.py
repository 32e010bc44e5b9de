"""Policy `load`: compares KV usage and the length of the prefill queue with thresholds, as Dynamo's planner does.

Unlike there, a worker is removed only if the others can take its work. Otherwise a constant load between the thresholds
would add and remove a worker for ever (two workers at 0.45 of their KV become one at 0.9).
"""

from __future__ import annotations

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.proposals import Proposal, added_within, unread
from dynamo_local.core.planning.window import History, QueueWindow, RoleWindow, Window

NEW_DECODE_WORKER_GRACE_PERIOD = 3
"""Adjustment intervals after a new decode worker in which none is removed, since its KV cache is only filling."""

NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD = 3
"""Adjustment intervals within which a queue whose trend makes it short gets no new worker."""

MAX_BUSY = 0.8
"""Maximum share of the time for which the remaining prefill workers may be busy, 0 to 1. At 1 their queue would grow
without end."""


def propose(role: RoleWindow, window: Window, history: History, options: PlannerOptions) -> Proposal:
    """Propose by KV usage for decode and aggregated workers, by the prefill queue for prefill workers."""
    if role.role == PREFILL_ROLE:
        return propose_prefill(role, window, history, options)
    return _propose_decode(role, history, options)


def _propose_decode(role: RoleWindow, history: History, options: PlannerOptions) -> Proposal:
    pressure = role.pressure
    figures = {"pressure": pressure, "kv_usage": role.kv_usage, "waiting": role.waiting}
    if pressure is None:
        return Proposal(0, f"hold: {unread(role)}", figures)
    up, down = options.decode_kv_scale_up_threshold, options.decode_kv_scale_down_threshold
    load = f"load {pressure:.2f} (KV usage {role.kv_usage:.2f}, {role.waiting:.1f} waiting)"
    if pressure > up:
        return Proposal(1, f"{load} is above {up:g}", figures)
    if pressure >= down:
        return Proposal(0, f"{load} is between {down:g} and {up:g}", figures)
    low = f"{load} is below {down:g}"
    if (why := _why_keep(role, history, pressure, up)) is not None:
        return Proposal(0, f"{low}, but {why}", figures)
    return Proposal(-1, low, figures)


def _why_keep(role: RoleWindow, history: History, pressure: float, up: float) -> str | None:
    if (missing := unread(role)) is not None:
        return missing
    if added_within(role, history, NEW_DECODE_WORKER_GRACE_PERIOD):
        return f"less than {NEW_DECODE_WORKER_GRACE_PERIOD} intervals have passed since a worker came"
    left = len(role.routable) - 1
    if left and (theirs := pressure * (left + 1) / left) >= up:
        return f"the load of the other {left} would be {theirs:.2f}"
    return None


def propose_prefill(role: RoleWindow, window: Window, history: History, options: PlannerOptions) -> Proposal:
    """Propose for the prefill role by the length of the prefill queue. Other policies use it as well."""
    queue, workers = window.queue, len(role.routable)
    if queue is None:
        return Proposal(0, "hold: the prefill queue cannot be read", {"queue": None})
    figures = {"queue": queue.mean, "queue_per_worker": None, "busy": role.busy}
    if not workers:
        return Proposal(0, "hold: no worker is ready", figures)
    waiting = queue.mean / workers
    figures["queue_per_worker"] = waiting
    up, down = options.prefill_queue_scale_up_threshold, options.prefill_queue_scale_down_threshold
    load = f"{waiting:.2f} jobs are queued per worker"
    if waiting > up:
        return _longer(queue, workers, up, f"{load}, above {up:g}", figures)
    if waiting >= down:
        return Proposal(0, f"{load}, between {down:g} and {up:g}", figures)
    return _shorter(role, f"{load}, below {down:g}", figures)


def _longer(queue: QueueWindow, workers: int, up: float, reason: str, figures: dict[str, float | None]) -> Proposal:
    later = (queue.last + NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD * (queue.last - queue.first)) / workers
    figures["queue_per_worker_later"] = later
    if later <= up:
        soon = f"in {NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD} intervals it will be {max(later, 0.0):.2f}"
        return Proposal(0, f"{reason}, but {soon}", figures)
    return Proposal(1, reason, figures)


def _shorter(role: RoleWindow, reason: str, figures: dict[str, float | None]) -> Proposal:
    if (why := unread(role)) is not None:
        return Proposal(0, f"{reason}, but {why}", figures)
    left, busy = len(role.routable) - 1, role.busy
    if left and busy is not None and busy / left > MAX_BUSY:
        return Proposal(0, f"{reason}, but the other {left} would be busy for {busy / left:.2f} of the time", figures)
    return Proposal(-1, reason, figures)
