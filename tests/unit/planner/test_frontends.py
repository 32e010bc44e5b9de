"""What frontends tell of the requests in flight in each revision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo_local.core.fleet.view import TTL_S
from dynamo_local.core.messages.presence import Counts, Presence
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.metrics import FrontendsWatch


@dataclass
class HeardBus:
    """A bus with one subscriber."""

    handlers: list[Any] = field(default_factory=list)

    async def listen_each(self, pattern: str, kind: type[Presence], handler: Any) -> None:
        assert (pattern, kind) == (Subjects("ns").presences_in_revisions, Presence)
        self.handlers.append(handler)

    async def publish(self, subject: str, data: bytes) -> None:
        assert (subject, data) == (Subjects("ns").probe_of_all, b"")

    async def hear(
        self,
        revision: str,
        watcher: str,
        in_flight: int | None,
        queued: int | None = None,
        taken: int | None = None,
    ) -> None:
        counts = Counts(in_flight=in_flight, queued=queued, taken=taken)
        lease = f"{revision} {watcher}"
        presence = Presence(watcher, "Service", "frontend", lease, 1, "ready", counts=counts, revision=revision)
        for handler in self.handlers:
            await handler(revision, presence)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def bus() -> HeardBus:
    return HeardBus()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def watch(bus: HeardBus, clock: Clock) -> FrontendsWatch:
    watch = FrontendsWatch(bus, Subjects("ns"), clock)  # type: ignore[arg-type]
    await watch.start()
    return watch


async def test_numbers_are_kept_apart_by_revision(bus: HeardBus, watch: FrontendsWatch) -> None:
    await bus.hear("chat@1", "ns_Frontend", 3)
    await bus.hear("chat@2", "ns_Frontend", 5)
    assert (watch.in_flight("chat@1"), watch.in_flight("chat@2"), watch.in_flight("code@1")) == (3, 5, None)
    watch.forget_others({"chat@2"})
    assert (watch.in_flight("chat@1"), watch.in_flight("chat@2")) == (None, 5)


async def test_several_frontends_add_up_and_one_without_a_number_makes_it_unknown(
    bus: HeardBus, watch: FrontendsWatch
) -> None:
    await bus.hear("chat@1", "ns_Frontend", 3)
    await bus.hear("chat@1", "ns_Frontend_1", 4)
    assert watch.in_flight("chat@1") == 7
    await bus.hear("chat@1", "ns_Frontend_1", None)
    assert watch.in_flight("chat@1") is None


async def test_a_frontend_that_falls_silent_is_unknown(bus: HeardBus, watch: FrontendsWatch, clock: Clock) -> None:
    await bus.hear("chat@1", "ns_Frontend", 3)
    clock.now = TTL_S + 0.1
    assert watch.in_flight("chat@1") is None


async def test_tasks_that_all_frontends_tell_of_are_counted_once(bus: HeardBus, watch: FrontendsWatch) -> None:
    await bus.hear("chat@1", "f1", 1, queued=30)
    await bus.hear("chat@1", "f2", 2, queued=29)
    assert (watch.in_flight("chat@1"), watch.queued("chat@1"), watch.queued("code@1")) == (3, 30, 0)
    # f2 learns of a task, and takes 12; f1 has 10.
    await bus.hear("chat@1", "f1", 10, queued=30, taken=10)
    await bus.hear("chat@1", "f2", 12, queued=29, taken=12)
    assert (watch.in_flight("chat@1"), watch.queued("chat@1")) == (22, 41 - 22)
    await bus.hear("chat@1", "f1", 10, queued=0, taken=10)
    await bus.hear("chat@1", "f2", 12, queued=5, taken=12)
    assert watch.queued("chat@1") == 0
