"""What is known of workers' caches: nothing of those that are gone, and who is not in step is asked until it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from components.router import cache_watch
from components.router.cache_watch import CacheWatch
from dynamo_local.core.errors import BusError
from dynamo_local.core.fleet.view import FleetView
from dynamo_local.core.messages.kv import KvChanges, KvStateQuestion
from dynamo_local.core.messages.presence import EngineInfo, Presence, ProcessState
from dynamo_local.core.routing.caches.index import pack
from dynamo_local.core.subjects import Subjects

SUBJECTS = Subjects("ns")
KV_BLOCKS = 4


@dataclass
class AskedBus:
    """Keeps whom it was to ask."""

    connections: int = 0
    asked: list[str] = field(default_factory=list)
    fails: bool = False
    handler: Any = None

    async def listen(self, subject: str, kind: Any, handler: Any) -> AskedBus:
        assert subject == SUBJECTS.kv_events_of_all
        self.handler = handler
        return self

    async def send(self, subject: str, message: msgspec.Struct) -> None:
        assert isinstance(message, KvStateQuestion)
        self.asked.append(subject)
        if self.fails:
            raise BusError("the buffer is full")


@dataclass
class Watched:
    """A watch that listens, and its view, whose changes it follows."""

    bus: AskedBus = field(default_factory=AskedBus)
    view: FleetView = field(default_factory=FleetView)
    news: int = 0

    def __post_init__(self) -> None:
        self.caches = CacheWatch(cast("Any", self.bus), SUBJECTS, self.view, self._on_news)

    def _on_news(self) -> None:
        self.news += 1

    async def start(self) -> Watched:
        await self.caches.start()
        return self

    def hears(self, lease: str, *, state: ProcessState = "ready", tells: bool = True) -> None:
        engine = EngineInfo("mocker", "m", 4096, 16, KV_BLOCKS, 8, kv_events=tells)
        for change in self.view.observe(Presence(f"ns_W_{lease}", "W", "decode", lease, 1, state, engine=engine), 0.0):
            self.caches.follow(change)

    def revokes(self, lease: str) -> None:
        for change in self.view.revoke(lease):
            self.caches.follow(change)

    async def is_told(self, lease: str, number: int, *stored: int, parts: int = 0) -> None:
        await self.bus.handler(KvChanges(lease, number, stored=pack(stored), parts=parts))

    def cached(self, *keys: int) -> dict[str, int]:
        return self.caches.index.cached(pack(keys))


@pytest.fixture
async def watched() -> Watched:
    return await Watched().start()


@asynccontextmanager
async def running(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(cache_watch, "_ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(cache_watch, "until_beat", lambda *_: 0.001)
    task = asyncio.create_task(watched.caches.run())
    yield
    task.cancel()
    await asyncio.wait([task])


async def asked(watched: Watched, *leases: str) -> None:
    """Wait until these workers have been asked since the last call."""
    wanted = {SUBJECTS.kv_state(lease) for lease in leases}
    async with asyncio.timeout(60.0):
        while not wanted <= set(watched.bus.asked):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    watched.bus.asked.clear()


async def quiet(watched: Watched) -> None:
    """Check that nobody is asked any more, once what is under way is done."""
    await asyncio.sleep(0.01)
    watched.bus.asked.clear()
    await asyncio.sleep(0.01)
    assert watched.bus.asked == []


async def test_a_worker_is_asked_until_it_is_in_step(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(watched, monkeypatch):
        watched.bus.fails = True
        watched.hears("a")
        await asked(watched, "a")
        watched.bus.fails = False
        await asked(watched, "a")
        assert watched.caches.out_of_step == 1
        await watched.is_told("a", 7, 1, 2, parts=1)
        assert (watched.caches.out_of_step, watched.cached(1, 2, 3)) == (0, {"a": 2})
        await quiet(watched)


async def test_a_gap_is_asked_for_and_closed(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(watched, monkeypatch):
        watched.hears("a")
        await watched.is_told("a", 0, parts=1)
        await watched.is_told("a", 1, 1)
        await watched.is_told("a", 3, 3)
        await asked(watched, "a")
        assert watched.caches.out_of_step == 1
        await watched.is_told("a", 3, 1, 2, parts=1)
        assert (watched.caches.out_of_step, watched.cached(1, 2)) == (0, {"a": 2})
        assert watched.cached(3) == {}


async def test_after_a_reconnection_all_are_asked(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    for lease in "ab":
        watched.hears(lease)
        await watched.is_told(lease, 1, 1)
    assert watched.caches.out_of_step == 0
    async with running(watched, monkeypatch):
        await quiet(watched)
        watched.bus.connections += 1
        await asked(watched, "a", "b")
        # What is known is used until it is told anew.
        assert watched.cached(1) == {"a": 1, "b": 1}


async def test_messages_of_the_gone_and_of_the_unknown_leave_nothing(watched: Watched) -> None:
    await watched.is_told("a", 1, 1)
    assert (len(watched.caches.index), watched.caches.out_of_step) == (0, 0)
    for lease in "ab":
        watched.hears(lease)
        await watched.is_told(lease, 0, 1, parts=1)
    watched.revokes("a")
    await watched.is_told("a", 1, 2)
    watched.hears("a", state="draining")
    assert (watched.cached(1), watched.cached(2), watched.caches.out_of_step) == ({"b": 1}, {}, 0)
    watched.hears("b", state="failed")
    await watched.is_told("b", 1, 2)
    assert (len(watched.caches.index), watched.caches.out_of_step) == (0, 0)
    assert watched.news > 0


async def test_of_a_worker_that_does_not_tell_as_many_blocks_as_it_has_are_assumed(watched: Watched) -> None:
    watched.hears("a", tells=False)
    assert watched.caches.out_of_step == 0
    watched.caches.assigned("a", pack([1, 2, 3]))
    assert watched.cached(1, 2, 3) == {"a": 3}
    watched.caches.assigned("a", pack([1, 4, 5]))
    assert (watched.cached(1, 4, 5), watched.cached(1, 2, 3)) == ({"a": 3}, {"a": 2})
    watched.hears("a", state="parked", tells=False)
    assert len(watched.caches.index) == 0


async def test_assignments_to_a_worker_that_tells_assume_nothing(watched: Watched) -> None:
    watched.hears("a")
    watched.caches.assigned("a", pack([1]))
    assert watched.cached(1) == {}


async def test_keys_that_are_none_do_no_harm(watched: Watched) -> None:
    watched.hears("a")
    await watched.bus.handler(KvChanges("a", 1, stored=b"123"))
    assert watched.caches.out_of_step == 1


async def test_a_watch_that_does_not_listen_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.hears("a")
    async with running(watched, monkeypatch):
        await quiet(watched)
    assert watched.caches.out_of_step == 0
