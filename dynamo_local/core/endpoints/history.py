"""What has become of an endpoint since the server started: how often it was parked, woken and so on. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from dynamo_local.core.endpoints.awake.idling import AT_START
from dynamo_local.core.messages.endpoints import EndpointHistory
from dynamo_local.core.messages.events import Event

CHANGES = frozenset({"park", "sleep", "wake", "swap"})
"""Kinds of events of endpoints that are counted."""


def noted(history: EndpointHistory, event: Event) -> EndpointHistory:
    """Add a dated event of the endpoint. A wake counts when it begins, a swap once the other endpoint is ready."""
    if event.kind not in CHANGES or event.cause == AT_START:
        return history
    last = event.what if not event.why else f"{event.what}: {event.why}"
    history = replace(history, last=last, last_at=event.time)
    match event.kind:
        case "park":
            return replace(history, parks=_one_more(history.parks, event.cause))
        case "sleep":
            return replace(history, sleeps=_one_more(history.sleeps, event.cause))
        case "wake" if event.took_s is None:
            return replace(history, wakes=_one_more(history.wakes, event.cause))
        case "swap" if event.took_s is not None:
            return replace(history, swaps=history.swaps + 1)
    return history


def _one_more(counts: Mapping[str, int], cause: str) -> dict[str, int]:
    return {**counts, cause: counts.get(cause, 0) + 1}
