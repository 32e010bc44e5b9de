"""Snapshots of a graph over a real bus: its processes, its queue, its planner."""

from __future__ import annotations

import asyncio
import time

import pytest

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, create_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core import codec
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import DecisionReport, PlannerReport
from dynamo_local.core.messages.work import PrefillJob, QueueLength
from dynamo_local.core.subjects import Subjects
from dynamo_local.monitor.graph_watch import REPORT_TTL_S, GraphWatch
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, until

pytestmark = pytest.mark.integration

QUIET = DecisionReport(1.0, "no change")
ADDED = DecisionReport(2.0, "add a decode worker", ("done",))


def report(*decisions: DecisionReport) -> PlannerReport:
    return PlannerReport("", "load", True, (), 1, 8, decisions=decisions)


class Clock:
    """The time is real, and can be put forward."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def subjects(subjects: Subjects) -> Subjects:
    """Those of processes that serve no model of their own, the planner among them."""
    return Subjects(subjects.namespace)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def watch(connect: Connect, subjects: Subjects, clock: Clock) -> GraphWatch:
    bus = await connect()
    fleet = FleetWatch(bus, subjects)
    watch = GraphWatch(bus, subjects, fleet, clock)
    await watch.start()
    await fleet.start()
    await bus.flush()
    return watch


async def tell(bus: Bus, subjects: Subjects, lease: str, state: str = "ready") -> None:
    presence = Presence("ns_W", "W", "decode", lease, 1, state)  # type: ignore[arg-type]
    await bus.publish(subjects.presence(presence.watcher, presence.role), codec.encode(presence))


async def test_a_watcher_whose_process_is_replaced_has_had_two(watch: GraphWatch, bus: Bus, subjects: Subjects) -> None:
    for lease in ("first", "first", "second"):
        await tell(bus, subjects, lease)
    await until(lambda: watch.snapshot().starts["ns_W"] == 2)
    assert [member.lease for member in watch.snapshot().members] == ["second"]
    assert watch.snapshot().routable == {"second"}


async def test_the_queue_is_read_again_and_again(watch: GraphWatch, bus: Bus, subjects: Subjects) -> None:
    await create_prefill_queue(bus, subjects)
    following = asyncio.create_task(watch.follow_queue())
    await until(lambda: watch.snapshot().queue == QueueLength(0, 0))
    await PrefillQueue(bus, subjects).publish(PrefillJob("j", "r", "f", 3, 60.0))
    await until(lambda: watch.snapshot().queue == QueueLength(1, 0))
    following.cancel()


async def test_a_graph_without_a_queue_has_no_length(watch: GraphWatch) -> None:
    await asyncio.wait_for(watch.follow_queue(), DEADLINE_S)
    assert watch.snapshot().queue is None


async def test_decisions_are_counted_once_each_however_often_they_are_told(
    watch: GraphWatch, bus: Bus, subjects: Subjects
) -> None:
    await bus.publish(subjects.planner, b"\xc1")
    for told in ((), (QUIET,), (QUIET,), (QUIET, ADDED), (ADDED,)):
        await bus.publish(subjects.planner, codec.encode(report(*told)))
    await until(lambda: watch.snapshot().planner == report(ADDED))
    assert watch.snapshot().decisions == {False: 1, True: 1}


async def test_what_a_planner_said_that_is_gone_says_nothing(
    watch: GraphWatch, bus: Bus, subjects: Subjects, clock: Clock
) -> None:
    await bus.publish(subjects.planner, codec.encode(report(QUIET)))
    await until(lambda: watch.snapshot().planner is not None)
    clock.ahead_s = REPORT_TTL_S + 1
    assert watch.snapshot().planner is None
    assert watch.snapshot().decisions == {False: 1}
