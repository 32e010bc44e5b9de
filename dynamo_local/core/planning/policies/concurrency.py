"""Policy `concurrency`: a fixed number of requests in flight per worker, as in LLM Engine.

The highest demand within `concurrency-window` counts, so workers are added at once and removed late.
"""

from __future__ import annotations

import math

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.proposals import Proposal, unread
from dynamo_local.core.planning.window import History, RoleWindow, Window


def propose(role: RoleWindow, window: Window, history: History, options: PlannerOptions) -> Proposal:
    """Propose by requests in flight; for prefill workers by jobs, waiting and in hand."""
    prefill = role.role == PREFILL_ROLE
    now = _demand(role.role, window)
    figures: dict[str, float | None] = {"in_flight": now, "most_in_flight": None, "workers_wanted": None}
    if now is None:
        why = "the prefill queue cannot be read" if prefill and window.queue is None else unread(role)
        return Proposal(0, f"hold: {why}", figures)
    seen = [(_demand(role.role, then), then) for then in history if then.ended >= window.ended - _span(options)]
    most = max([now, *(demand for demand, _ in seen if demand is not None)])
    per_worker = options.prefill_requests_per_worker if prefill else options.requests_per_worker
    needed = math.ceil(most / per_worker)
    figures |= {"most_in_flight": most, "workers_wanted": float(needed)}
    have = len(role.staying)
    reason = (
        f"at most {most:.1f} requests in flight in {_span(options):g} s, {per_worker:g} per worker, "
        f"need {needed} {'worker' if needed == 1 else 'workers'}"
    )
    if needed > have:
        return Proposal(1, f"{reason}, there are {have}", figures)
    if needed == have:
        return Proposal(0, reason, figures)
    if (why := unread(role) or _unwatched(window, history, options)) is not None:
        return Proposal(0, f"{reason}, there are {have}, but {why}", figures)
    return Proposal(-1, f"{reason}, there are {have}", figures)


def _demand(role: str, window: Window) -> float | None:
    if role == PREFILL_ROLE:
        return None if window.queue is None else window.queue.in_flight
    found = window.role(role)
    return None if found is None else found.in_flight


def _span(options: PlannerOptions) -> float:
    return options.concurrency_window


def _unwatched(window: Window, history: History, options: PlannerOptions) -> str | None:
    """Return why the demand is not known to have been low for the whole window, or None if it is."""
    since = min([window.started, *(then.started for then in history)])
    watched = window.ended - since
    return None if watched >= _span(options) else f"it has been watched for {watched:.0f} s only"
