"""The planner's loop for endpoints with fake pulls and a fake server, and what its recorders make of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

from dynamo_local.core import codec
from dynamo_local.core.messages.endpoints import EndpointStatus
from dynamo_local.core.messages.reports import EndpointReport, Event, PlannerReport
from dynamo_local.core.planning.actions import ActionOutcome
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.endpoints.decision import (
    EndpointDecision,
    EndpointsObservation,
    OrderOutcome,
    ScaleEndpoint,
)
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import Observation
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.decision_log import DecisionLog
from dynamo_local.planner.loop import EndpointsLoop
from dynamo_local.planner.publisher import PlannerPublisher
from dynamo_local.planner.tensorboard import CHANGES, TensorBoardRecorder
from tests.unit.core.planning.endpoints.endpoint_fleets import pull, seen, spec

OPTIONS = PlannerOptions(adjustment_interval=30)
GROWN = ScaleEndpoint("chat", 7)


@dataclass
class FakeServer:
    """A server whose board does not change meanwhile, or which refuses orders."""

    refuses: str = ""
    given: list[ScaleEndpoint] = field(default_factory=list)

    async def scale(self, order: ScaleEndpoint) -> tuple[OrderOutcome, EndpointStatus | None]:
        self.given.append(order)
        if self.refuses:
            return OrderOutcome(False, self.refuses), None
        return OrderOutcome(True), EndpointStatus("ready", wanted=order.workers or 0)


@dataclass
class Told:
    """A recorder that keeps what it is told of endpoints."""

    pulls: list[tuple[EndpointsObservation, tuple[EndpointDecision, ...]]] = field(default_factory=list)
    decisions: list[tuple[EndpointDecision, OrderOutcome | None]] = field(default_factory=list)

    def observed(self, observation: Observation) -> None:
        raise AssertionError("no graph's own workers here")

    def decided(self, decision: Decision, outcomes: Sequence[ActionOutcome]) -> None:
        raise AssertionError("no graph's own workers here")

    def endpoints_observed(self, observation: EndpointsObservation, decisions: Sequence[EndpointDecision]) -> None:
        self.pulls.append((observation, tuple(decisions)))

    def endpoint_decided(self, decision: EndpointDecision, outcome: OrderOutcome | None) -> None:
        self.decisions.append((decision, outcome))

    def endpoint_changed(self, event: Event) -> None:
        raise AssertionError("the loop makes no such changes")

    def close(self) -> None:
        pass


@dataclass
class Turns:
    """A loop over endpoint `chat`, with 100 requests in flight at first."""

    server: FakeServer = field(default_factory=FakeServer)
    told: Told = field(default_factory=Told)
    options: PlannerOptions = OPTIONS
    in_flight: int | None = 100
    now: float = 0.0

    def __post_init__(self) -> None:
        self.loop = EndpointsLoop(self.options, self._pull, self.server.scale, [self.told], clock=lambda: self.now)

    async def _pull(self) -> EndpointsObservation:
        self.now += 1.0
        return pull(seen(spec(), in_flight=self.in_flight), at=self.now)

    async def turn(self, number: int = 1) -> None:
        for _ in range(number):
            await self.loop.turn()


async def test_an_order_is_given_once_and_recorded_with_its_outcome() -> None:
    turns = Turns()
    await turns.turn(3)
    assert turns.server.given == [GROWN]
    decision, outcome = turns.told.decisions[0]
    assert (decision.order, outcome) == (GROWN, OrderOutcome(True))
    assert turns.loop.promised.endpoints == 7, "workers that are still to start have devices already"


async def test_a_decision_is_recorded_again_only_if_its_gist_changes() -> None:
    turns = Turns(in_flight=3)
    await turns.turn(5)
    assert len(turns.told.decisions) == 1
    turns.in_flight = None
    await turns.turn(5)
    assert [each.reasons.partition(":")[0] for each, _ in turns.told.decisions] == ["wants 1", "wants 1"]
    assert len(turns.told.pulls) == 10


async def test_an_observer_orders_nothing() -> None:
    turns = Turns(options=PlannerOptions(no_operation=True))
    await turns.turn(5)
    assert turns.server.given == []
    decision, outcome = turns.told.decisions[0]
    assert (decision.order, decision.acts, outcome) == (GROWN, False, None)
    assert turns.loop.promised.endpoints == 1
    assert len(turns.told.decisions) == 1


async def test_a_refused_order_is_recorded_and_tried_again_after_an_interval() -> None:
    turns = Turns(FakeServer(refuses="endpoint chat is being deleted"))
    await turns.turn(30)
    assert len(turns.server.given) == 1
    assert turns.told.decisions[0][1] == OrderOutcome(False, "endpoint chat is being deleted")
    await turns.turn(2)
    assert len(turns.server.given) == 2


async def test_orders_of_several_endpoints_do_not_wait_for_each_other() -> None:
    """The second order is given although the first one is not answered yet."""
    orders: list[str] = []

    class Slow(FakeServer):
        async def scale(self, order: ScaleEndpoint) -> tuple[OrderOutcome, EndpointStatus | None]:
            import asyncio

            orders.append(order.name)
            while len(orders) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            return await super().scale(order)

    async def both() -> EndpointsObservation:
        return pull(seen(spec(), in_flight=30), seen(spec("code"), in_flight=30))

    await EndpointsLoop(OPTIONS, both, Slow().scale).turn()
    assert sorted(orders) == ["chat", "code"]


async def test_each_decision_is_a_line_of_json_with_its_figures(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl", {"namespace": "ns", "model": "m", "acts": True})
    turns = Turns()
    turns.loop = EndpointsLoop(OPTIONS, turns._pull, turns.server.scale, [log])
    await turns.turn()
    line = json.loads(log.path.read_text())
    assert line["time"] > 0
    assert {key: line[key] for key in ("namespace", "endpoint", "policy", "acts", "devices", "max_devices")} == {
        "namespace": "ns", "endpoint": "chat", "policy": "concurrency", "acts": True, "devices": 1, "max_devices": 8
    }  # fmt: skip
    assert "model" not in line, "that is the graph's own"
    assert line["order"] == {"workers": 7, "prefill_workers": None}
    assert line["outcome"] == {"done": True, "note": ""}
    role = line["roles"][0]
    assert (role["ordered"], role["wanted"], role["gets"], role["order"], role["ready"]) == (1, 7, 7, 7, 1)
    assert (role["in_flight"], role["most_in_flight"]) == (100, 100)


def test_what_the_server_does_by_itself_is_a_line_of_json(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl", {"namespace": "ns", "model": "m", "acts": True})
    log.endpoint_changed(Event("park", "parked", "no request for 60 s", endpoint="chat", cause="idle"))
    log.endpoint_changed(Event("swap", "yields its device to code", "asked for", endpoint="chat", to="code"))
    log.endpoint_changed(Event("wake", "awake after 0.52 s", endpoint="chat", cause="request", took_s=0.52))
    park, swap, wake = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert park.pop("time") > 0
    assert park == {
        "namespace": "ns", "endpoint": "chat", "change": "park", "cause": "idle",
        "text": "chat: parked (no request for 60 s)",
    }  # fmt: skip
    assert (swap["change"], swap["to"], swap["took_s"]) == ("swap", "code", None)
    assert (wake["cause"], wake["took_s"], wake["text"]) == ("request", 0.52, "chat: awake after 0.52 s")


def series_of(folder: Path) -> dict[str, float]:
    events = EventAccumulator(str(folder), size_guidance={TENSORS: 0})
    events.Reload()
    return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}


async def test_each_endpoint_has_curves(tmp_path: Path) -> None:
    recorder = TensorBoardRecorder(tmp_path, clock=lambda: 0.0)
    turns = Turns()
    turns.loop = EndpointsLoop(OPTIONS, turns._pull, turns.server.scale, [recorder])
    await turns.turn(2)
    recorder.close()
    assert series_of(recorder.folder) == {
        "endpoint_chat/in_flight": 100, "endpoint_chat/ready": 1, "endpoint_chat/ordered": 1,
        "endpoint_chat/wanted": 7, "endpoint_chat/share": 7, "endpoint_chat/parked": 0, "endpoint_chat/asleep": 0,
        "endpoint_chat/parks": 0, "endpoint_chat/wakes": 0, "endpoint_chat/swaps": 0,
    }  # fmt: skip


def test_what_the_server_does_by_itself_is_text_in_tensorboard(tmp_path: Path) -> None:
    recorder = TensorBoardRecorder(tmp_path, clock=lambda: 0.0)
    recorder.endpoint_changed(Event("park", "parked", "no request for 60 s", endpoint="chat", cause="idle"))
    recorder.close()
    events = EventAccumulator(str(recorder.folder), size_guidance={TENSORS: 0})
    events.Reload()
    (text,) = events.Tensors(CHANGES)
    assert text.tensor_proto.string_val == [b"**chat** parked: no request for 60 s"]


async def test_what_is_unknown_has_no_point(tmp_path: Path) -> None:
    recorder = TensorBoardRecorder(tmp_path, clock=lambda: 0.0)
    turns = Turns(in_flight=None)
    turns.loop = EndpointsLoop(OPTIONS, turns._pull, turns.server.scale, [recorder])
    await turns.turn()
    recorder.close()
    assert "endpoint_chat/in_flight" not in series_of(recorder.folder)


class SentBus:
    """A bus that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, msgspec.Struct]] = []

    async def send(self, subject: str, message: msgspec.Struct) -> None:
        self.sent.append((subject, message))


@pytest.mark.parametrize(("refuses", "told"), [("", ()), ("no", ("not done: no",))])
async def test_reports_and_events_tell_of_orders(refuses: str, told: tuple[str, ...]) -> None:
    bus, subjects = SentBus(), Subjects("ns")
    publisher = PlannerPublisher(bus, subjects, OPTIONS)  # type: ignore[arg-type]
    turns = Turns(FakeServer(refuses))
    turns.loop = EndpointsLoop(OPTIONS, turns._pull, turns.server.scale, [publisher])
    await turns.turn(2)
    report = codec.decode(codec.encode(publisher.report()), PlannerReport)
    share = None if refuses else 7
    assert report.endpoints == (EndpointReport("chat", "aggregated", 1, 1, 100, share, share, state="ready"),)
    assert (report.roles, report.devices, report.max_devices) == ((), 1, 8)
    assert [decision.outcomes for decision in report.decisions] == [told]
    await publisher.publish_events()
    change = "chat: 7 workers instead of 1"
    what = f"not done: {change}: no" if refuses else change
    reasons = "planner: wants 7: at most 100 requests in flight in 600 s, 16 per worker"
    assert bus.sent == [(subjects.events, Event("scale", what, reasons))]


async def test_what_an_observer_would_order_is_an_event_until_it_changes() -> None:
    bus, subjects = SentBus(), Subjects("ns")
    publisher = PlannerPublisher(bus, subjects, OPTIONS)  # type: ignore[arg-type]
    turns = Turns(options=PlannerOptions(no_operation=True))
    turns.loop = EndpointsLoop(turns.options, turns._pull, turns.server.scale, [publisher])
    await turns.turn(3)
    await publisher.publish_events()
    assert [message.kind for _, message in bus.sent if isinstance(message, Event)] == ["planner"]
