"""Publishes events (core/messages/events.py) to the server, which writes them down."""

from __future__ import annotations

import logging

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.events import Event
from dynamo_local.core.subjects import Subjects

_log = logging.getLogger(__name__)


async def publish_event(bus: Bus, subjects: Subjects, event: Event) -> None:
    """Publish an event. A failure is logged, not raised: no work depends on the record of it."""
    try:
        await bus.send(subjects.events, event)
    except BusError as error:
        _log.info("an event is not recorded (%s): %s", event.what, error)
