"""Reads the length of a prefill queue for observations."""

from __future__ import annotations

import logging

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.planning.observation import QueueReading
from dynamo_local.core.subjects import Subjects
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)


class QueueReader:
    """Reads one queue, at each pull."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._queue = PrefillQueue(bus, subjects)
        self._whose = f" of {subjects.revision}" if subjects.revision else ""
        self._failure = LogOnce(_log)

    async def read(self) -> QueueReading | None:
        """Return the queue's length; None if it cannot be read, which is logged once."""
        if not self._bus.connected:
            return None
        try:
            length = await self._queue.length()
        except BusError as error:
            self._failure.warn(f"the prefill queue{self._whose} cannot be read: {error}")
            return None
        self._failure.clear()
        return QueueReading(length.waiting, length.in_hand)
