"""Publishes which blocks this worker has cached: changes as they come, and all of them for a reader that asks.

Messages have numbers, by which a reader notices that it has missed one (core/messages/kv.py). Readers take part
or not; what is published does not depend on them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.kv import KvChanges, KvStateQuestion
from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.routing.caches.mirror import CacheMirror
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)

_PAUSE_S = 0.05
"""Shortest time between two publications: changes of several steps travel together. Routers count what requests under
way are about to store without being told."""

_REPEAT_S = 0.2
"""Shortest time between two repetitions. One serves all who have asked meanwhile."""

_LAST_S = 1.0
"""Quiet time after which a message without changes ends a burst, for readers that have missed its last message."""

_FAILED_S = 1.0
"""Pause after a publication that has failed. Then all is repeated."""


class KvPublisher:
    """Publishes the cached blocks of one engine."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._mirror = CacheMirror(context.lease)
        self._woken = asyncio.Event()
        self._asked = False
        self._repeated_at = 0.0

    async def start(self) -> None:
        """Begin to publish, if the engine tells of its cache. The presence says whether it does."""
        engine = self._context.announcer.presence.engine
        if engine is None or not engine.kv_events:
            return
        context = self._context
        context.tasks.spawn("kv events", self._run())
        await context.bus.listen(context.subjects.kv_state(context.lease), KvStateQuestion, self._on_question)

    @property
    def cached_blocks(self) -> int:
        """Number of blocks that the engine has cached, as far as it has told."""
        return len(self._mirror)

    def note(self, changes: CacheChanges | None) -> None:
        """Take note of what a step has changed."""
        if changes is not None:
            self._mirror.apply(changes)
            self._woken.set()

    async def _on_question(self, _: KvStateQuestion) -> None:
        self._asked = True
        self._woken.set()

    async def _run(self) -> None:
        bursting = False
        while True:
            try:
                bursting = await self._publish_what_is_due(bursting)
                await asyncio.sleep(_PAUSE_S)
            except BusError as error:
                _log.warning("changes of the KV cache could not be published: %s", error)
                self._asked = True
                self._woken.set()
                await asyncio.sleep(_FAILED_S)

    async def _publish_what_is_due(self, bursting: bool) -> bool:
        """Wait until there is something to publish, and do. Returns whether a message without changes is to follow."""
        try:
            async with asyncio.timeout(_LAST_S if bursting else None):
                await self._woken.wait()
        except TimeoutError:
            await self._send([self._mirror.nothing_new()])
            return False
        self._woken.clear()
        bursting |= self._mirror.has_news
        await self._send(self._mirror.take())
        await self._repeat()
        return bursting

    async def _repeat(self) -> None:
        if not self._asked:
            return
        now = time.monotonic()
        if now < self._repeated_at + _REPEAT_S:
            self._woken.set()
            return
        self._asked, self._repeated_at = False, now
        await self._send(self._mirror.repetition())

    async def _send(self, messages: Sequence[KvChanges]) -> None:
        subject = self._context.subjects.kv_events(self._context.lease)
        for message in messages:
            await self._context.bus.send(subject, message)
