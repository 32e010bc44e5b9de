"""Whether a model has room for a request that generates, and the refusal of one for which it has none."""

from __future__ import annotations

from components.frontend.http.generations.exchange import RETRY_NO_WORKER_S, GenerationRequest, unavailable
from components.frontend.http.models import ModelEntry
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.bounds.limits import LIMITED
from dynamo_local.core.http.waiting.holding import GiveUp, Unready, refused
from dynamo_local.core.priority.classes import PriorityClass
from dynamo_local.core.priority.occupancy import may_come, share_of

RETRY_BUSY_S = 1
"""Seconds until a client that was refused for want of room may ask again."""


def has_room(entry: ModelEntry, request: GenerationRequest, asked: int) -> bool:
    """Return whether as many sequences as are asked for may come beside those that are under way."""
    return may_come(asked, request.key, request.priority_class, entry.limits.max_requests, *entry.taken)


def busy(entry: ModelEntry, request: GenerationRequest, asked: int) -> Refusal:
    """Return the refusal of a request for which there is no room: who is ahead of it, and how much its key has."""
    one, lowest = request.priority_class, tuple(PriorityClass)[-1]
    ahead, all_of_them = (sum(part.ahead(each) for part in entry.taken) for each in (one, lowest))
    of_these = "" if ahead == all_of_them else f" of priority {one} or higher"
    bound = entry.limits.max_requests
    share = share_of(request.key, one, bound, *entry.taken)
    of_key = f", {share.has} of them with this key, whose share is {share.share}" if share.keys > 1 else ""
    under_way = f"{ahead} of at most {bound} sequences{of_these} (setting max-requests) are under way"
    return _limited(f"{under_way}{of_key}, {asked} asked for", RETRY_BUSY_S)


def not_held(entry: ModelEntry, request: GenerationRequest, unready: Unready) -> GiveUp | None:
    """Return why a request that has just come is not held; None: it may be."""
    one, most = request.priority_class, entry.limits.max_held
    waiting = sum(part.ahead(one) for part in entry.held)
    return refused(unready, waiting, entry.limits, has_room=may_come(1, request.key, one, most, *entry.held))


def refusal_of(step: GiveUp) -> Refusal:
    """Return the refusal of a request that is not held, or no longer."""
    if step.full:
        return _limited(step.why, RETRY_NO_WORKER_S)
    return unavailable(step.why, retry_s=None if step.for_good else RETRY_NO_WORKER_S)


def _limited(why: str, retry_s: int) -> Refusal:
    """Return a refusal as OpenAI's for a limit."""
    return Refusal(429, why, "requests", retry_after_s=retry_s, code=LIMITED)
