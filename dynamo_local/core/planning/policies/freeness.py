"""Policy `freeness`: keeps the mean freeness of the workers in a range, as Llumnix does (core/fleet/freeness.py)."""

from __future__ import annotations

from dynamo_local.core.fleet.freeness import freeness, measured
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.policies.load import propose_prefill
from dynamo_local.core.planning.proposals import Proposal, names_of, unread
from dynamo_local.core.planning.window import History, RoleWindow, Window, WorkerWindow, mean


def propose(role: RoleWindow, window: Window, history: History, options: PlannerOptions) -> Proposal:
    """Propose by mean freeness. For prefill workers the queue counts instead, since their requests do not grow."""
    if role.role == PREFILL_ROLE:
        return propose_prefill(role, window, history, options)
    now = mean_freeness(role)
    figures = {"freeness": now, "kv_usage": role.kv_usage, "waiting": role.waiting}
    if now is None:
        return Proposal(0, f"hold: {unread(role) or 'the size of the KV caches is not known'}", figures)
    low, high = options.freeness_scale_up_threshold, options.freeness_scale_down_threshold
    held = _held(role, history, options.freeness_hold_intervals)
    intervals = options.freeness_hold_intervals
    if now < low:
        long_enough = all(value is not None and value < low for value in held)
        reason = f"freeness {now:.0f} is below {low:g}"
        return Proposal(1, reason, figures) if long_enough else _too_short(reason, intervals, figures)
    if now <= high:
        return Proposal(0, f"freeness {now:.0f} is between {low:g} and {high:g}", figures)
    reason = f"freeness {now:.0f} is above {high:g}"
    if not all(value is not None and value > high for value in held):
        return _too_short(reason, intervals, figures)
    if (why := _why_keep(role, low)) is not None:
        return Proposal(0, f"{reason}, but {why}", figures)
    return Proposal(-1, reason, figures, victim=fewest_running(role))


def mean_freeness(role: RoleWindow) -> float | None:
    """Return the mean freeness of the routable workers whose load is known; None if there is none."""
    return mean(_freeness(worker) for worker in role.known)


def fewest_running(role: RoleWindow) -> str | None:
    """Return the worker with the fewest running requests; of several, the one with the highest suffix."""
    known = sorted(role.known, key=lambda worker: worker.rank, reverse=True)
    return min(known, key=lambda worker: worker.running or 0.0).watcher if known else None


def _freeness(worker: WorkerWindow, times: float = 1.0) -> float | None:
    if worker.kv_tokens is None or worker.kv_usage is None or worker.running is None or worker.head_tokens is None:
        return None
    running, urgent = worker.running * times, (worker.urgent or 0.0) * times
    return freeness(measured(worker.kv_tokens, worker.kv_usage * times, running, worker.head_tokens, urgent=urgent))


def _held(role: RoleWindow, history: History, intervals: int) -> list[float | None]:
    """Return the mean freeness of the `intervals - 1` windows before this one, oldest first. None stands for a window
    that is missing or had other workers: the load has to settle after an action."""
    before = [window.role(role.role) for window in history[len(history) - (intervals - 1) :]] if intervals > 1 else []
    values = [mean_freeness(then) if then is not None and names_of(then) == names_of(role) else None for then in before]
    return [*([None] * (intervals - 1 - len(values))), *values]


def _why_keep(role: RoleWindow, low: float) -> str | None:
    if (missing := unread(role)) is not None:
        return missing
    left = len(role.routable) - 1
    if not left:
        return None
    theirs = mean(_freeness(worker, (left + 1) / left) for worker in role.known)
    if theirs is None or theirs < low:
        return f"that of the other {left} would be below {low:g}"
    return None


def _too_short(reason: str, intervals: int, figures: dict[str, float | None]) -> Proposal:
    return Proposal(0, f"{reason}, but has not been with these workers for {intervals} intervals", figures)
