"""Follows the lengths of the prefill queues of endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, QueueLength
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.subjects import Subjects
from dynamo_local.monitor.graph_watch import QUEUE_EVERY_S

_log = logging.getLogger(__name__)


class QueueLengths:
    """`lengths`: of the queues that could be read last, by revision. `revisions` returns those that have a queue."""

    def __init__(self, bus: Bus, namespace: str, revisions: Callable[[], Collection[str]]) -> None:
        self._bus = bus
        self._namespace = namespace
        self._revisions = revisions
        self.lengths: dict[str, QueueLength] = {}

    async def follow(self) -> None:
        """Read all of them every `QUEUE_EVERY_S` until cancelled."""
        while True:
            read = {revision: await self._length(revision) for revision in self._revisions()}
            self.lengths = {revision: length for revision, length in read.items() if length is not None}
            await asyncio.sleep(QUEUE_EVERY_S)

    async def _length(self, revision: str) -> QueueLength | None:
        try:
            return await PrefillQueue(self._bus, Subjects(self._namespace, revision)).length()
        except BusError as error:
            _log.info("the length of the prefill queue of %s is unknown: %s", revision, error)
            return None
