"""Follows the numbers of requests in flight that frontends announce in the revisions they serve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.subscriptions import Message
from dynamo_local.core import codec
from dynamo_local.core.errors import DecodeError
from dynamo_local.core.fleet.view import FRONTEND_ROLE, in_flight_of, ttl_s
from dynamo_local.core.messages.presence import Presence, as_received
from dynamo_local.core.subjects import Subjects, revision_in

_log = logging.getLogger(__name__)


class FrontendsWatch:
    """The last presence of each frontend in each revision. A FleetWatch of all endpoints follows their workers."""

    def __init__(self, bus: Bus, subjects: Subjects, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._subjects = subjects
        self._clock = clock
        self._heard: dict[str, dict[str, tuple[Presence, float]]] = {}
        """By revision and watcher, with the time (CLOCK_MONOTONIC, s)."""

    async def start(self) -> None:
        """Listen, and ask all processes to publish their presence now."""
        await self._bus.subscribe(self._subjects.presences_of_endpoints, self._on_presence)
        await self._bus.publish(self._subjects.probe_of_all, b"")

    def in_flight(self, revision: str) -> int | None:
        """Requests of that revision that its frontends have admitted and not finished. None if there is no frontend, or
        one of them tells no number."""
        return in_flight_of(self._living(revision))

    def held(self, revision: str) -> int | None:
        """Sequences in flight that wait for a worker. None as in `in_flight`."""
        counts = [presence.counts for presence in self._living(revision)]
        known = [each.held for each in counts if each is not None and each.held is not None]
        return sum(known) if counts and len(known) == len(counts) else None

    def queued(self, revision: str) -> int:
        """Asynchronous tasks that no frontend has in hand. All frontends know all tasks, as they are in one store."""
        counts = [presence.counts for presence in self._living(revision) if presence.counts is not None]
        known = max(((each.queued or 0) + (each.taken or 0) for each in counts), default=0)
        return max(0, known - sum(each.taken or 0 for each in counts))

    def forget_others(self, revisions: set[str]) -> None:
        """Forget the revisions that are not among these."""
        for revision in self._heard.keys() - revisions:
            del self._heard[revision]

    def _living(self, revision: str) -> list[Presence]:
        now = self._clock()
        return [presence for presence, at in self._heard.get(revision, {}).values() if now - at <= ttl_s(presence)]

    async def _on_presence(self, message: Message) -> None:
        now = self._clock()
        try:
            presence = as_received(codec.decode(message.data, Presence), now)
        except DecodeError as error:
            _log.debug("a presence on %s cannot be read: %s", message.subject, error)
            return
        if presence.role == FRONTEND_ROLE:
            known = self._heard.setdefault(revision_in(message.subject), {})
            known[presence.watcher] = presence, now
