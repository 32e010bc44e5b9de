"""Policy `load`: KV usage and length of the prefill queue against thresholds, as Dynamo's planner does it.

To its rules one is added on the way down: a worker goes only if the others can do its work. Otherwise a constant load
between the thresholds would have a worker come and go for ever (two at 0.45 of their KV become one at 0.9).
"""

from __future__ import annotations

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.proposals import Proposal, added_within, unread
from dynamo_local.core.planning.window import History, QueueWindow, RoleWindow, Window

NEW_DECODE_WORKER_GRACE_PERIOD = 3
"""Adjustment intervals after a new decode worker in which none is removed: its KV cache fills only then."""

NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD = 3
"""Adjustment intervals that a queue, by its trend, has to become short by itself."""

MAX_BUSY = 0.8
"""Share of the time for which the prefill workers that stay may be busy. At 1 their queue would grow for ever."""


def wish(role: RoleWindow, window: Window, history: History, options: PlannerOptions) -> Proposal:
    """See `wishes.Policy`."""
    if role.role == PREFILL_ROLE:
        return prefill_wish(role, window, history, options)
    return _decode_wish(role, history, options)


def _decode_wish(role: RoleWindow, history: History, options: PlannerOptions) -> Proposal:
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


def prefill_wish(role: RoleWindow, window: Window, history: History, options: PlannerOptions) -> Proposal:
    """Other policies go by the queue as well. (No history: a queue has none.)"""
    queue, workers = window.queue, len(role.routable)
    if queue is None:
        return Proposal(0, "hold: the prefill queue cannot be read", {"queue": None})
    figures = {"queue": queue.mean, "queue_per_worker": None, "busy": role.busy}
    if not workers:
        return Proposal(0, "hold: no worker is ready", figures)
    waiting = queue.mean / workers
    figures["queue_per_worker"] = waiting
    up, down = options.prefill_queue_scale_up_threshold, options.prefill_queue_scale_down_threshold
    load = f"{waiting:.2f} jobs wait for each of {workers}"
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
