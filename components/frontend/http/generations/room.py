"""Whether a model has room for a request that generates, and the refusal of one for which it has none."""

from __future__ import annotations

from components.frontend.http.generations.exchange import GenerationRequest
from components.frontend.http.models import ModelEntry
from dynamo_local.core.http.admission import Refusal
from dynamo_local.core.priority.classes import PriorityClass
from dynamo_local.core.priority.occupancy import may_come, share_of

RETRY_BUSY_S = 1
"""Seconds until a client that was refused for want of room may ask again."""


def has_room(entry: ModelEntry, request: GenerationRequest, asked: int) -> bool:
    """Return whether as many sequences as are asked for may come beside those that are under way."""
    one = request.priority_class
    return may_come(asked, request.key, one, entry.bound(one), *entry.taken)


def busy(entry: ModelEntry, request: GenerationRequest, asked: int) -> Refusal:
    """Return the refusal of a request for which there is no room: who is ahead of it, and how much its key has."""
    one, lowest = request.priority_class, tuple(PriorityClass)[-1]
    ahead = entry.others_ahead(one) + sum(part.ahead(one) for part in entry.taken)
    of_these = "" if ahead == entry.demand + entry.others_ahead(lowest) else f" of priority {one} or higher"
    share = share_of(request.key, one, entry.bound(one), *entry.taken)
    of_key = f", {share.has} of them with this key, whose share is {share.share}" if share.keys > 1 else ""
    bound = entry.limits.max_requests
    under_way = f"{ahead} of at most {bound} sequences{of_these} (setting max-requests) are under way"
    why = f"{under_way}{of_key}, {asked} asked for"
    return Refusal(429, why, "RateLimitError", retry_after_s=RETRY_BUSY_S)
