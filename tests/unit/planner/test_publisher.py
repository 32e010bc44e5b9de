"""The planner's report: repeated decisions are one, with their number and since when; changes are events as well."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from dynamo_local.core import codec
from dynamo_local.core.messages.reports import DecisionReport, EndpointReport, Event, PlannerReport
from dynamo_local.core.planning.actions import Action, ActionOutcome, OrderOutcome, RemoveWorker
from dynamo_local.core.planning.decide import decide
from dynamo_local.core.planning.decision import Decision, Verdict
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import Observation, main_of
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.publisher import PlannerPublisher
from tests.unit.core.planning import endpoint_fleets
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
    publisher.observed(Observation(0.0, (main_of(pull(worker())),), 1), ())
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


@pytest.mark.parametrize(
    ("outcome", "told"), [(OrderOutcome(True), ()), (OrderOutcome(False, "no"), ("not done: no",))]
)
async def test_reports_and_events_tell_of_orders(outcome: OrderOutcome, told: tuple[str, ...], bus: SentBus) -> None:
    publisher = PlannerPublisher(bus, SUBJECTS, PlannerOptions())  # type: ignore[arg-type]
    observation = endpoint_fleets.pull(endpoint_fleets.seen(endpoint_fleets.spec(), in_flight=100))
    decisions = decide(observation, {}, PlannerOptions()).decisions
    publisher.observed(observation, decisions)
    publisher.decided(decisions[0], (outcome,))
    found = codec.decode(codec.encode(publisher.report()), PlannerReport)
    assert found.endpoints == (EndpointReport("chat", "aggregated", 1, 1, 100, 7, 7, state="ready"),)
    assert (found.roles, found.devices, found.max_devices) == ((), 1, 8)
    assert [each.outcomes for each in found.decisions] == [told]
    await publisher.publish_events()
    change = "chat: 7 workers instead of 1"
    what = change if outcome.done else f"not done: {change}: no"
    reasons = "planner: wants 7: at most 100 requests in flight in 600 s, 16 per worker"
    assert bus.sent == [(SUBJECTS.events, Event("scale", what, reasons))]


async def test_what_an_observer_would_order_is_an_event(publisher: PlannerPublisher, bus: SentBus) -> None:
    observation = endpoint_fleets.pull(endpoint_fleets.seen(endpoint_fleets.spec(), in_flight=100))
    publisher.decided(endpoint_fleets.decided(observation, PlannerOptions(no_operation=True))["chat"], ())
    await publisher.publish_events()
    assert [message.kind for _, message in bus.sent if isinstance(message, Event)] == ["planner"]
