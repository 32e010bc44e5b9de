"""A reader and sources on other machines that cannot be read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from components.workers import kv_puller
from components.workers.kv_puller import KvPuller
from dynamo_local.core.messages.kv import PinAnswer
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Prefix
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard

DEADLINE_S = 60.0
NETWORK = "10.1.2.0/24"


class Bus:
    """A bus with sources on another machine, all of which lend."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, subject: str, question: Any, reply: Any, *, timeout_s: float) -> PinAnswer:
        self.asked.append(subject)
        return PinAnswer(3, machine="another", pin=f"theirs.{len(self.asked)}")

    async def send(self, subject: str, message: Any) -> None:
        """Send to nobody."""


class Reader:
    """A worker's puller, with an engine whose reads end when `ends` is set, or do not (`ended`)."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.settled: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        self.tasks = TaskGuard()
        self.bus = Bus()
        presence = SimpleNamespace(engine=SimpleNamespace(kv_network=NETWORK))
        context: Any = SimpleNamespace(
            tasks=self.tasks,
            bus=self.bus,
            subjects=Subjects("ns", ""),
            announcer=SimpleNamespace(presence=presence),
        )
        engine: Any = self
        self.puller = KvPuller(context, engine)

    def prefix(self, *_: object) -> Prefix:
        return Prefix("same", (b"a", b"b", b"c"))

    async def cached(self, _: Prefix) -> int:
        return 0

    async def read_ended(self, _: str) -> bool:
        await self.ends.wait()
        return False

    async def settle_read(self, pin: str, *, held: bool) -> None:
        self.settled.put_nowait((pin, held))

    async def pulls(self, name: str, source: str) -> bool:
        work = Submit(name, 1, "f", [1, 2, 3], msgspec.Raw(b"\x80"), source=source)
        return await self.puller.pull(work, source) is not None

    async def is_settled(self) -> None:
        assert await asyncio.wait_for(self.settled.get(), DEADLINE_S) == ("theirs.1", False)


async def test_after_a_read_that_failed_nothing_is_pulled_from_that_worker() -> None:
    """Each request would wait for the end of its own read otherwise."""
    reader = Reader()
    assert await reader.pulls("one", "cut off")
    reader.ends.set()
    await reader.is_settled()
    assert not await reader.pulls("two", "cut off")
    assert len(reader.bus.asked) == 1
    assert await reader.pulls("three", "reachable")


async def test_a_worker_is_asked_again_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_puller, "_AVOIDED_S", 0.0)
    reader = Reader()
    assert await reader.pulls("one", "cut off")
    reader.ends.set()
    await reader.is_settled()
    assert await reader.pulls("two", "cut off")


async def test_a_request_that_is_over_before_its_read_says_nothing_of_the_worker() -> None:
    """The prefix was computed after all, for instance since it had to wait in the engine."""
    reader = Reader()
    assert await reader.pulls("one", "source")
    await reader.puller.done([RequestEpoch("one", 1)])
    await reader.is_settled()
    reader.ends.set()
    await reader.is_settled()
    assert await reader.pulls("two", "source")


async def test_an_engine_that_is_closed_is_not_told_of_reads_under_way() -> None:
    reader = Reader()
    assert await reader.pulls("one", "source")
    await asyncio.sleep(0)
    assert await reader.tasks.close() == []
    assert reader.settled.empty()
