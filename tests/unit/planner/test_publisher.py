"""The planner's report: repeated decisions are one, with their number and since when; changes are events as well."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from dynamo_local.core import codec
from dynamo_local.core.messages.reports import DecisionReport, Event, PlannerReport
from dynamo_local.core.planning.actions import Action, ActionOutcome, RemoveWorker
from dynamo_local.core.planning.decision import Decision, Verdict
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.publisher import PlannerPublisher
from tests.unit.core.planning.fleets import pull, worker

REMOVE = RemoveWorker("ns_VllmWorker_1", "decode")
SUBJECTS = Subjects("ns")


class SentBus:
    """A bus that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, msgspec.Struct]] = []

    async def send(self, subject: str, message: msgspec.Struct) -> None:
        self.sent.append((subject, message))


def ticks() -> Iterator[float]:
    yield from map(float, range(100, 200))


@pytest.fixture
def bus() -> SentBus:
    return SentBus()


@pytest.fixture
def publisher(bus: SentBus) -> PlannerPublisher:
    options = PlannerOptions(max_gpu_budget=4, no_operation=True)
    return PlannerPublisher(bus, SUBJECTS, options, "ns_Planner", wall_clock=ticks().__next__)  # type: ignore[arg-type]


def decision(load: float, *actions: Action, acts: bool = True) -> Decision:
    return Decision(0.0, "load", (Verdict("decode", 0, f"load {load:.2f}"),), actions, 2, 4, acts)


def report(publisher: PlannerPublisher) -> PlannerReport:
    publisher.observed(pull(worker()))
    told = publisher.report()
    return codec.decode(codec.encode(told), PlannerReport)


def test_a_decision_that_is_repeated_is_one_with_its_last_figures(publisher: PlannerPublisher) -> None:
    for load in (0.1, 0.2, 0.3):
        publisher.decided(decision(load), ())
    publisher.decided(decision(0.3, REMOVE), (ActionOutcome(REMOVE, True, REMOVE.watcher, "ended", 1.0),))
    publisher.decided(decision(0.4), ())
    assert report(publisher).decisions == (
        DecisionReport(102.0, "no change (decode: load 0.30)", times=3, since=100.0),
        DecisionReport(103.0, "remove VllmWorker_1 (decode: load 0.30)", ("done: ended",)),
        DecisionReport(104.0, "no change (decode: load 0.40)"),
    )


def test_two_actions_in_a_row_are_two(publisher: PlannerPublisher) -> None:
    for _ in range(2):
        publisher.decided(decision(0.3, REMOVE), (ActionOutcome(REMOVE, False, None, "no", 1.0),))
    assert [each.times for each in report(publisher).decisions] == [1, 1]


async def test_what_an_observer_would_do_is_an_event_until_it_changes(
    publisher: PlannerPublisher, bus: SentBus
) -> None:
    publisher.decided(decision(0.3, REMOVE), (ActionOutcome(REMOVE, True, REMOVE.watcher, "ended", 1.0),))
    for load in (0.1, 0.2):
        publisher.decided(decision(load, REMOVE, acts=False), ())
    publisher.decided(decision(0.2), ())
    publisher.decided(decision(0.2, REMOVE, acts=False), ())
    await publisher.publish_events()
    await publisher.publish_events()
    assert bus.sent == [
        (SUBJECTS.events, Event("planner", "would remove VllmWorker_1", "decode: load 0.10", "ns_Planner")),
        (SUBJECTS.events, Event("planner", "would remove VllmWorker_1", "decode: load 0.20", "ns_Planner")),
    ]
