"""Events (core/messages/events.py) as lines of text. Pure, apart from the local time zone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime

from dynamo_local.core.messages.events import Event
from dynamo_local.core.names import short_watcher

WATCHER_WIDTH = 16
"""Width of the column of watchers and endpoints. A longer name moves the rest of its line."""

_SERVER = "-"


def chosen(events: Iterable[Event], kinds: Collection[str], cutoff: float | None) -> list[Event]:
    """Return the events of these kinds (none: all) since the cutoff (Unix time; None: all)."""
    return [
        event for event in events if (not kinds or event.kind in kinds) and (cutoff is None or event.time >= cutoff)
    ]


def line_of(event: Event, today: datetime) -> str:
    """Return an event as one line: local time, watcher or endpoint, what happened, and why in brackets. Times of other
    days than `today` have their date."""
    at = datetime.fromtimestamp(event.time).astimezone()
    time = f"{at:%H:%M:%S}" if at.date() == today.date() else f"{at:%Y-%m-%d %H:%M:%S}"
    what = event.what if event.request is None else f"{event.request} {event.what}"
    why = f" ({event.why})" if event.why else ""
    line = f"{time}  {_subject(event):{WATCHER_WIDTH}}  {what}{why}"
    return " ".join(line.splitlines())


def _subject(event: Event) -> str:
    return short_watcher(event.watcher) if event.watcher else event.endpoint or _SERVER
