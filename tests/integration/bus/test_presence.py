"""Presence on a real bus: ready is routable; draining, revoked or silent is not. The clock is the test's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from dynamo_local.bus.nats import Bus, RawMessage
from dynamo_local.bus.presence import TICK_S, Announcer, FleetWatch
from dynamo_local.core import codec
from dynamo_local.core.beats import BEAT_S, QUIET_BEAT_S
from dynamo_local.core.fleet.view import TTL_S, Change, Happened
from dynamo_local.core.messages.presence import LeaseRevoked, Load, Presence
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import NO_PROCESS, until
from tests.integration.nats_process import NatsProcess

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
NEVER_S = 1e9
"""Between beats, so that what is published has another cause."""


class Observer:
    """A fleet view on its own connection, by a clock that is put forward by hand."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.now = 100.0
        self.watch = FleetWatch(bus, subjects, clock=lambda: self.now)
        self.changes: list[Change] = []
        self._changed = asyncio.Event()
        self.watch.subscribe(self._note)

    def _note(self, change: Change) -> None:
        self.changes.append(change)
        self._changed.set()

    def routable(self) -> list[str]:
        return [presence.lease for presence in self.watch.view.routable()]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_routable(self, *leases: str) -> None:
        await self.until(lambda: self.routable() == list(leases))

    def pass_time(self, seconds: float) -> None:
        """Let time pass tick by tick, as for a running watch."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.watch.tick()


@pytest.fixture
async def observer(connect: Connect, subjects: Subjects) -> Observer:
    observer = Observer(await connect(), subjects)
    await observer.watch.start()
    return observer


@pytest.fixture
def announcer(bus: Bus, subjects: Subjects) -> Callable[[str], Announcer]:
    def make(lease: str) -> Announcer:
        presence = Presence(
            watcher=f"{subjects.namespace}_Worker_{lease}",
            component="Worker",
            role="aggregated",
            lease=lease,
            # No process has it: one that waits for CPU time would not be taken for gone.
            pid=2**31 - 1,
            state="starting",
        )
        return Announcer(bus, subjects, presence, interval_s=NEVER_S)

    return make


async def test_a_worker_becomes_routable_once_it_is_ready_and_leaves_when_it_drains(
    observer: Observer, announcer: Callable[[str], Announcer]
) -> None:
    worker, tasks = announcer("a1"), TaskGuard()
    tasks.spawn("presence", worker.run())
    await observer.until(lambda: bool(observer.watch.view.members()))
    assert observer.routable() == []
    worker.update(state="ready")
    await observer.until_routable("a1")
    worker.update(state="draining")
    await observer.until_routable()
    assert observer.watch.view.get("a1") is not None
    await tasks.close()


async def test_changes_are_published_at_once_and_loads_with_the_next_beat(
    bus: Bus, subjects: Subjects, announcer: Callable[[str], Announcer]
) -> None:
    published: asyncio.Queue[Presence] = asyncio.Queue()

    async def note(presence: Presence) -> None:
        published.put_nowait(presence)

    await bus.listen(subjects.presences, Presence, note)
    worker, tasks = announcer("a1"), TaskGuard()
    tasks.spawn("presence", worker.run())
    await published.get()
    worker.note(load=Load(running=3))
    worker.update(state="starting")  # what it was: no change
    for detail in ("one", "two"):
        worker.update(detail=detail)
        news = await asyncio.wait_for(published.get(), DEADLINE_S)
        assert (news.detail, news.load) == (detail, Load(running=3))
    await tasks.close()


async def test_a_process_is_heard_again_and_again(bus: Bus, subjects: Subjects) -> None:
    heard, enough = 0, asyncio.Event()

    async def count(_: RawMessage) -> None:
        nonlocal heard
        heard += 1
        if heard == 3:
            enough.set()

    await bus.subscribe(subjects.presences, count)
    presence = Presence("ns_W", "W", "aggregated", "a1", NO_PROCESS, "ready")
    tasks = TaskGuard()
    tasks.spawn("presence", Announcer(bus, subjects, presence, interval_s=0.001).run())
    await asyncio.wait_for(enough.wait(), DEADLINE_S)
    await tasks.close()


async def test_a_process_without_news_says_that_it_is_quiet_until_it_has_some(
    bus: Bus, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_local.bus.presence.QUIET_AFTER_S", 0.1)
    # Before anybody would speak again by itself, the test would be over.
    monkeypatch.setattr("dynamo_local.bus.presence.QUIET_BEAT_S", NEVER_S)
    heard: asyncio.Queue[Presence] = asyncio.Queue()

    async def note(presence: Presence) -> None:
        heard.put_nowait(presence)

    async def until_quiet() -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not (await heard.get()).quiet:
                worker.note(load=Load(running=0, at=time.monotonic()))  # no news

    await bus.listen(subjects.presences, Presence, note)
    first = Presence("ns_W", "W", "aggregated", "a1", NO_PROCESS, "ready", load=Load(running=0))
    worker, tasks = Announcer(bus, subjects, first, interval_s=0.01), TaskGuard()
    tasks.spawn("presence", worker.run())
    await until_quiet()
    worker.note(load=Load(running=1))
    news = await asyncio.wait_for(heard.get(), DEADLINE_S)
    assert (news.quiet, news.load) == (False, Load(running=1))
    await until_quiet()
    worker.update(state="draining")
    news = await asyncio.wait_for(heard.get(), DEADLINE_S)
    assert (news.quiet, news.state) == (False, "draining")
    await tasks.close()


async def test_a_quiet_process_is_missed_as_long_after_the_beat_that_it_missed(
    observer: Observer, bus: Bus, subjects: Subjects
) -> None:
    """The watch looks rarely, and at the times that it has set."""
    presence = Presence("ns_W", "W", "aggregated", "a1", NO_PROCESS, "ready", quiet=True)
    await bus.publish(subjects.presence("ns_W", "aggregated"), codec.encode(presence))
    await observer.until_routable("a1")
    silent_at = observer.watch.view.next_expiry()
    assert silent_at == observer.now + TTL_S + QUIET_BEAT_S - BEAT_S
    looks = 0
    while observer.routable():
        observer.watch.tick()
        looks += 1
        assert observer.now <= silent_at + TICK_S
        observer.now = observer.watch.due_at
    assert silent_at < observer.now
    # Twice while it may only be waiting for a core, which two looks tell.
    assert 3 <= looks <= 7


async def test_who_joins_late_asks_and_is_answered(
    connect: Connect, subjects: Subjects, announcer: Callable[[str], Announcer]
) -> None:
    worker, tasks = announcer("a1"), TaskGuard()
    worker.update(state="ready")
    tasks.spawn("presence", worker.run())
    for _ in range(2):
        newcomer = Observer(await connect(), subjects)
        await newcomer.watch.start()
        await newcomer.until_routable("a1")
    await tasks.close()


async def test_a_revoked_worker_is_never_routable_again(
    observer: Observer, bus: Bus, subjects: Subjects, announcer: Callable[[str], Announcer]
) -> None:
    worker, other = announcer("a1"), announcer("b2")
    for each in (worker, other):
        each.update(state="ready")
        await each.announce()
    await observer.until_routable("a1", "b2")
    await bus.publish(subjects.revoked, codec.encode(LeaseRevoked(lease="a1")))
    await observer.until_routable("b2")
    await worker.announce()
    other.update(detail="heard after the other")
    await other.announce()
    await observer.until(lambda: observer.watch.view.routable()[0].detail != "")
    assert observer.routable() == ["b2"]
    assert [c.presence.lease for c in observer.changes if c.what is Happened.REVOKED] == ["a1"]


async def test_a_silent_worker_leaves_in_time_and_may_come_back(
    observer: Observer, announcer: Callable[[str], Announcer]
) -> None:
    worker = announcer("a1")
    worker.update(state="ready")
    await worker.announce()
    await observer.until_routable("a1")
    observer.pass_time(TTL_S)
    assert observer.routable() == ["a1"]
    observer.pass_time(3.0 - TTL_S - TICK_S)
    assert observer.routable() == []
    assert observer.changes[-1].what is Happened.LEFT
    await worker.announce()
    await observer.until_routable("a1")


async def test_a_process_that_stood_still_does_not_blame_the_others(
    observer: Observer, announcer: Callable[[str], Announcer]
) -> None:
    """Presences that arrived meanwhile lie unread in its socket."""
    worker = announcer("a1")
    worker.update(state="ready")
    await worker.announce()
    await observer.until_routable("a1")
    observer.pass_time(1.0)
    observer.now += 60.0
    observer.watch.tick()
    assert observer.routable() == ["a1"]
    observer.pass_time(TTL_S - 1.0 + 2 * TICK_S)
    assert observer.routable() == []


async def test_who_says_the_same_again_is_not_missed_and_who_was_missed_is_back(
    observer: Observer, announcer: Callable[[str], Announcer], bus: Bus
) -> None:
    worker = announcer("a1")
    worker.update(state="ready")
    for _ in range(3):
        await worker.announce()
        await bus.flush()
        await until(lambda: observer.watch.view.next_expiry() == observer.now + TTL_S)
        observer.pass_time(TTL_S - TICK_S)
    assert [change.what for change in observer.changes] == [Happened.APPEARED]
    observer.pass_time(3 * TICK_S)
    await worker.announce()
    await observer.until_routable("a1")
    assert [change.what for change in observer.changes] == [Happened.APPEARED, Happened.LEFT, Happened.APPEARED]


async def test_who_falls_silent_is_missed_as_soon_as_it_may_be(
    observer: Observer, announcer: Callable[[str], Announcer]
) -> None:
    """The watch looks at the times that it has set."""
    worker = announcer("a1")
    worker.update(state="ready")
    await worker.announce()
    await observer.until_routable("a1")
    observer.now += 0.1  # not at a beat
    silent_at = observer.watch.view.next_expiry()
    while observer.routable():
        observer.watch.tick()
        assert observer.now <= silent_at + TICK_S
        observer.now = observer.watch.due_at
    assert silent_at < observer.now


async def test_while_the_bus_is_down_nobody_is_missed(own_nats: NatsProcess, subjects: Subjects) -> None:
    bus = await Bus.connect(own_nats.address, name="test")
    observer = Observer(bus, subjects)
    await observer.watch.start()
    presence = Presence("ns_W", "W", "aggregated", "a1", NO_PROCESS, "ready")
    await bus.publish(subjects.presence("ns_W", "aggregated"), codec.encode(presence))
    await observer.until_routable("a1")
    own_nats.kill()
    await until(lambda: not bus.connected)
    observer.pass_time(60.0)
    assert observer.routable() == ["a1"]
    own_nats.start()
    await until(lambda: bus.connected)
    observer.pass_time(TTL_S + 2 * TICK_S)
    assert observer.routable() == []
    await bus.close()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"{}", codec.encode(LeaseRevoked(lease="a1")) + b"x"])
async def test_garbage_harms_nothing(
    observer: Observer, bus: Bus, subjects: Subjects, announcer: Callable[[str], Announcer], garbage: bytes
) -> None:
    for subject in (subjects.presence("x", "aggregated"), subjects.revoked, subjects.probe):
        await bus.publish(subject, garbage)
    worker = announcer("a1")
    worker.update(state="ready")
    await worker.announce()
    await observer.until_routable("a1")
    assert len(observer.watch.view.members()) == 1


async def test_who_watches_frontends_alone_hears_nothing_of_others(
    bus: Bus, subjects: Subjects, announcer: Callable[[str], Announcer]
) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    watch = FleetWatch(bus, subjects, frontends_alone=True)
    watch.subscribe(lambda change: heard.put_nowait(change.presence.lease))
    worker, tasks = announcer("a1"), TaskGuard()
    frontend = Announcer(bus, subjects, Presence("t_Frontend", "Frontend", "frontend", "f1", 1, "ready"))
    for each in (worker, frontend):
        tasks.spawn("presence", each.run())
    await watch.start()
    assert await asyncio.wait_for(heard.get(), DEADLINE_S) == "f1"
    await worker.announce()
    await frontend.announce()
    await bus.flush()
    assert [each.lease for each in watch.view.members()] == ["f1"]
    await tasks.close()
