"""Presence: a process announces itself on the bus, and keeps a view of all other processes.

A worker is routable from its announcement "ready" on, until it announces "draining", its lease is revoked, or it has
been silent for `fleet.TTL_S`. A process that is silent because it waits for CPU time is not taken for gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dynamo_local.bus.nats import Bus, RawMessage, Subscription
from dynamo_local.core import codec
from dynamo_local.core.beats import BEAT_S, QUIET_AFTER_S, QUIET_BEAT_S, until_beat
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import FRONTEND_ROLE, TTL_S, Change, FleetView
from dynamo_local.core.messages.presence import Counts, LeaseRevoked, Load, Presence, as_received, as_sent
from dynamo_local.core.process.soft_binding import ThreadTimes, shares_between
from dynamo_local.core.subjects import Subjects
from state.machine.identity import machine_id
from state.machine.processes import start_time
from state.machine.threads import times_of_all

_log = logging.getLogger(__name__)

TICK_S = BEAT_S / 2
"""Shortest time between two looks for silent processes. Messages that have arrived are read in between."""

_EXPIRED_S = 0.001
"""Look so much later than the next expiry, so that it has passed then."""

_LOOKED_AT_BEFORE_S = TTL_S / 2
"""A silent process is looked at from so long before its expiry: whether it waits for CPU time."""


class Announcer:
    """Publishes the presence of this process: at every beat (core/beats.py), on every change, and when probed."""

    def __init__(self, bus: Bus, subjects: Subjects, presence: Presence, *, interval_s: float = BEAT_S) -> None:
        self._bus = bus
        self._interval_s = interval_s
        self._subject = subjects.presence(presence.watcher, presence.role)
        self._probes = {subjects.probe, subjects.probe_of_all}
        if presence.role == FRONTEND_ROLE:
            self._probes.add(subjects.probe_of_frontends)
        self._presence = presence
        self._changed = asyncio.Event()
        self._changed_at = self._told_at = time.monotonic()
        self._told = presence

    @property
    def presence(self) -> Presence:
        return self._presence

    def update(self, **changes: Any) -> None:
        """Change fields of the presence, and publish it at the next turn of the event loop."""
        updated = msgspec.structs.replace(self._presence, **changes)
        if updated != self._presence:
            self._presence = updated
            self._changed_at = time.monotonic()
            self._changed.set()

    def note(self, *, load: Load | None = None, counts: Counts | None = None) -> None:
        """Change load or counts, which change all the time: published with the next beat, or at once if this process
        was quiet. None leaves a value as it is."""
        was = self._presence
        self._presence = msgspec.structs.replace(
            was,
            load=was.load if load is None else load,
            counts=was.counts if counts is None else counts,
        )
        if not _same(was, self._presence):
            self._changed_at = time.monotonic()
            if was.quiet:
                self._changed.set()

    async def announce(self, *, anew: bool = False) -> None:
        """Publish now. A failure is logged, not raised: the next beat publishes again. `anew`: a process that has not
        heard the last announcement listens."""
        now = time.monotonic()
        if anew or self._presence != self._told:
            self._told, self._told_at = self._presence, now
        try:
            await self._bus.send(self._subject, as_sent(self._presence, now, self._told_at))
        except BusError as error:
            _log.warning("this process could not announce itself on NATS, and will try again: %s", error)

    async def run(self) -> None:
        """Publish at every beat and change until cancelled."""

        async def on_probe(_: RawMessage) -> None:
            await self.announce(anew=True)

        for probe in self._probes:
            await self._bus.subscribe(probe, on_probe)
        while True:
            self._changed.clear()
            quiet = time.monotonic() - self._changed_at > QUIET_AFTER_S
            self._presence = msgspec.structs.replace(self._presence, quiet=quiet)
            await self.announce()
            interval_s = max(self._interval_s, QUIET_BEAT_S) if quiet else self._interval_s
            # Not wait_for, which in Python 3.11 loses a cancellation that comes together with a change.
            with suppress(TimeoutError):
                async with asyncio.timeout(until_beat(time.monotonic(), interval_s)):
                    await self._changed.wait()


def _same(one: Presence, other: Presence) -> bool:
    """Whether load and counts are equal, apart from the time at which the load was measured."""
    return one.counts == other.counts and _timeless(one.load) == _timeless(other.load)


def _timeless(load: Load | None) -> Load | None:
    return None if load is None else msgspec.structs.replace(load, at=None)


class FleetWatch:
    """Keeps a FleetView up to date from the bus, and calls listeners for every change.

    The processes are those of the subjects' revision, or those that serve no model of their own. `everywhere`: these
    and the workers of all endpoints. `frontends_alone`: nothing is heard of others, which may be many.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        clock: Callable[[], float] = time.monotonic,
        *,
        everywhere: bool = False,
        frontends_alone: bool = False,
    ) -> None:
        self.view = FleetView()
        self._everywhere = everywhere
        self._frontends_alone = frontends_alone
        self._bus = bus
        self._subjects = subjects
        self._clock = clock
        self._listeners: list[Callable[[Change], None]] = []
        self._subscriptions: list[Subscription] = []
        self.due_at = math.inf
        """Time of the next look for silent processes."""
        self._last: dict[str, tuple[bytes, str]] = {}
        """By subject, the last presence as bytes, and its lease."""
        self._starvation = Starvation()
        self._echo = bus.inbox()
        self._echoed = asyncio.Event()

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` on the event loop for each change of the fleet."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Listen, and ask these processes to publish their presence now instead of at their next beat."""
        bus, subjects, listening = self._bus, self._subjects, self._subscriptions
        heard = subjects.presences_of_frontends if self._frontends_alone else subjects.presences
        listening.append(await bus.subscribe(heard, self._on_presence))
        listening.append(await bus.listen(subjects.revoked, LeaseRevoked, self._on_revoked))
        if self._everywhere:
            listening.append(await bus.subscribe(subjects.presences_of_workers, self._on_presence))
            listening.append(await bus.listen(subjects.revoked_of_endpoints, LeaseRevoked, self._on_revoked))
        listening.append(await bus.subscribe(self._echo, self._on_echo))
        await bus.publish(subjects.probe_of_frontends if self._frontends_alone else subjects.probe, b"")

    async def stop(self) -> None:
        """Listen no more. For a watch that ends before its process does."""
        while self._subscriptions:
            await self._subscriptions.pop().unsubscribe()

    async def run(self) -> None:
        """Expire silent processes until cancelled."""
        while True:
            if self.view.silent(self._clock(), _LOOKED_AT_BEFORE_S):
                # `tick` counts the wait as deafness of this process.
                await self.hears(TTL_S)
            self.tick()
            await asyncio.sleep(max(0.0, self.due_at - self._clock()))

    async def hears(self, within_s: float) -> bool:
        """Whether a message of our own comes back in that time: NATS may be away, stopped, or wait for CPU time."""
        self._echoed.clear()
        with suppress(BusError, TimeoutError):
            async with asyncio.timeout(within_s):
                if self._bus.connected:
                    await self._bus.publish(self._echo, b"")
                    await self._echoed.wait()
                    return True
        return False

    async def _on_echo(self, _: RawMessage) -> None:
        self._echoed.set()

    def tick(self) -> None:
        """Expire silent processes, and set the time of the next look: the next beat, or the next expiry before that.

        Silence says nothing while this process is deaf: while the bus is down, or its event loop stands still and what
        has arrived lies unread in the socket. That time is excused.
        """
        now = self._clock()
        late_s = now - self.due_at
        self.due_at = now + until_beat(now, BEAT_S)
        if not self._bus.connected:
            self.view.excuse_silence(now)
            return
        if late_s > TICK_S:
            self.view.excuse_silence(now, late_s)
        silent = self.view.silent(now, _LOOKED_AT_BEFORE_S)
        self._tell(self.view.expire(now, self._starvation.look(silent)))
        if silent:
            next_look = self.view.next_expiry()
        else:
            next_look = self.view.next_expiry() - _LOOKED_AT_BEFORE_S
            self.due_at = now + until_beat(now, QUIET_BEAT_S if self.view.quiet() else BEAT_S)
        self.due_at = max(now + TICK_S, min(self.due_at, next_look + _EXPIRED_S))

    async def _on_presence(self, message: RawMessage) -> None:
        now = self._clock()
        # Most announcements repeat the last one. They are compared as bytes: decoding costs far more.
        last = self._last.get(message.subject)
        if last is not None and last[0] == message.data and self.view.heard_again(last[1], now):
            return
        try:
            # `clock` is for silence alone: who looks at a load goes by CLOCK_MONOTONIC.
            presence = as_received(codec.decode(message.data, Presence), time.monotonic())
        except DecodeError as error:
            _log.warning("the announcement of a process on %s cannot be read: %s", message.subject, error)
            return
        self._last[message.subject] = message.data, presence.lease
        self._tell(self.view.observe(presence, now))

    async def _on_revoked(self, revoked: LeaseRevoked) -> None:
        self._tell(self.view.revoke(revoked.lease))

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            for listener in self._listeners:
                listener(change)


# Tells processes that are silent because they wait for CPU time from processes that are gone or hang.

_STARVED = 0.5
"""A process is starved if its threads have waited for a core for this share of the time since the last look."""
_LASTS_S = 1.0
"""A process counts as starved for so long after such a look. After a moment on a core, its next wait shows late."""


@dataclass(frozen=True)
class _Seen:
    at: float
    started: int
    threads: Mapping[int, ThreadTimes]
    starved_until: float = -math.inf


class Starvation:
    """Follows silent processes from look to look. A process that is gone, a zombie, stopped or asleep is not starved,
    nor is one that has got the pid of a dead process meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def look(self, silent: Iterable[Presence]) -> frozenset[str]:
        """Return the leases of those that are starved. Costs nothing while no process is silent. A pid of another
        machine says nothing here."""
        looks = ((presence, self._look(presence)) for presence in silent if presence.machine in ("", machine_id()))
        self._seen = {presence.lease: seen for presence, seen in looks if seen is not None}
        return frozenset(lease for lease, seen in self._seen.items() if seen.at <= seen.starved_until)

    def _look(self, presence: Presence) -> _Seen | None:
        started, now = start_time(presence.pid), self._clock()
        if started is None:
            return None
        threads, before = times_of_all([presence.pid]), self._seen.get(presence.lease)
        if before is None:
            return _Seen(now, started, threads)
        if started != before.started:
            return replace(before, starved_until=-math.inf)
        seconds = now - before.at
        if shares_between(before.threads, threads, seconds).waited_s < _STARVED * seconds:
            return _Seen(now, started, threads, before.starved_until)
        if before.starved_until < before.at:
            _log.warning("%s is silent: it waits for CPU time that other processes have", presence.watcher)
        return _Seen(now, started, threads, now + _LASTS_S)
