"""The event (core/messages/events.py) of a migration that has ended."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dynamo_local.core.messages.admin import MigrationResult
from dynamo_local.core.messages.events import Event
from dynamo_local.core.migration.protocol import MigrationOutcome

WHY: Mapping[str, str] = MappingProxyType(
    {
        "drain": "its worker drains",
        "role": "its worker prefills now",
        "hand": "`dynamo migrate`",
        "rebalance": "to balance the load",
        "room": "to make room for a request that waits",
        "thrash": "its worker gives up KV again and again, and computes it anew",
        "trial": "its worker is set apart for a suspect request",
    }
)
"""Reasons of migrations (core/migration/protocol.py) in words."""


def migration_event(result: MigrationResult, reason: str, source: str, destination: str) -> Event:
    """Return the event. `source` and `destination` are watchers. Pure."""
    why = WHY.get(reason, reason)
    if result.outcome == MigrationOutcome.MIGRATED:
        what = f"migrated to {destination}{_gap(result)}"
    else:
        what, why = f"not migrated to {destination}", f"{why}; {result.outcome}: {result.why}"
    return Event(
        "migration",
        what,
        why,
        source,
        request=result.request_id,
        outcome=result.outcome,
        source=source,
        destination=destination,
        gap_s=result.gap_s,
    )


def _gap(result: MigrationResult) -> str:
    if result.gap_s is None:
        return ""
    steps = "" if result.gap_steps is None else f" ({result.gap_steps:.1f} steps)"
    return f", gap {result.gap_s * 1e3:.0f} ms{steps}"
