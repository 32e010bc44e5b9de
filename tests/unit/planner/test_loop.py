"""The planner's loop with fake pulls and a fake server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest

from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.messages.endpoints import EndpointStatus
from dynamo_local.core.planning.actions import (
    Action,
    ActionOutcome,
    AddWorker,
    OrderOutcome,
    Outcome,
    ScaleEndpoint,
)
from dynamo_local.core.planning.decision import Decision, Recorder
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import EndpointSeen, Fleet, Observation, main_of
from dynamo_local.planner.loop import PlannerLoop
from tests.unit.core.planning.endpoint_fleets import pull as endpoints
from tests.unit.core.planning.endpoint_fleets import seen, spec
from tests.unit.core.planning.fleets import prefiller, pull, worker

OPTIONS = PlannerOptions(adjustment_interval=0.03, metric_pulling_interval=0.01, max_gpu_budget=4)
ADD = AddWorker("decode", "VllmWorker")


@dataclass
class FakeServer:
    """A server that carries out actions and orders, or raises and refuses as it is set to."""

    raises: Exception | None = None
    refuses: str = ""
    """Why it refuses orders of numbers."""
    given: list[ScaleEndpoint] = field(default_factory=list)
    taken: list[tuple[Action, int, str]] = field(default_factory=list)
    before: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an action begins."""
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def take_action(self, action: Action, max_devices: int, why: str) -> ActionOutcome:
        self.taken.append((action, max_devices, why))
        self.before.set()
        await self.may_end.wait()
        if self.raises is not None:
            raise self.raises
        return ActionOutcome(action, True, "ns_VllmWorker_1", "ready", 1.0)

    async def scale(self, order: ScaleEndpoint) -> tuple[OrderOutcome, EndpointStatus | None]:
        """Carry out an order; the board does not show it yet."""
        self.given.append(order)
        if self.refuses:
            return OrderOutcome(False, self.refuses), None
        return OrderOutcome(True), EndpointStatus("ready", wanted=order.workers or 0)


@dataclass
class Told(Recorder):
    """A recorder that keeps what it receives."""

    pulls: list[Observation] = field(default_factory=list)
    decisions: list[tuple[Decision, tuple[Outcome, ...]]] = field(default_factory=list)
    begun: list[Action | None] = field(default_factory=list)

    def observed(self, observation: Observation, decisions: Sequence[Decision]) -> None:
        self.pulls.append(observation)

    def decided(self, decision: Decision, outcomes: Sequence[Outcome]) -> None:
        self.decisions.append((decision, tuple(outcomes)))

    def acting(self, action: Action | None) -> None:
        self.begun.append(action)


GROWN = ScaleEndpoint("chat", 7)
SLOW = PlannerOptions(adjustment_interval=30)
BUSY = pull(worker(kv=0.95), prefiller(busy=True))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def server() -> FakeServer:
    server = FakeServer()
    server.may_end.set()
    return server


@asynccontextmanager
async def planning(
    server: FakeServer,
    told: Told,
    options: PlannerOptions = OPTIONS,
    *,
    fleet: Callable[[], Fleet] = lambda: BUSY,
    others: Callable[[], Sequence[EndpointSeen]] = tuple,
) -> AsyncIterator[None]:
    """Run a planner of a graph with these workers, and of other endpoints."""

    async def next_pull() -> Observation:
        at = time.monotonic()
        moved = (replace(each, fleet=replace(each.fleet, at=at)) for each in others())
        return Observation(at, (main_of(replace(fleet(), at=at)), *moved), None)

    loop = PlannerLoop(options, next_pull, server.take_action, server.scale, [told])
    running = asyncio.create_task(loop.run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_an_interval_is_watched_decided_on_acted_on_and_recorded(server: FakeServer, told: Told) -> None:
    async with planning(server, told):
        await until(lambda: told.decisions)
        decision, outcomes = told.decisions[0]
    assert decision.actions == (ADD,)
    assert server.taken[0] == (ADD, 4, decision.reasons)
    assert sum(observation.at <= decision.at for observation in told.pulls) >= 2
    assert outcomes == (ActionOutcome(ADD, True, "ns_VllmWorker_1", "ready", 1.0),)
    assert told.begun[:2] == [ADD, None]


async def test_nothing_is_decided_on_while_an_action_is_under_way(server: FakeServer, told: Told) -> None:
    server.may_end.clear()
    async with planning(server, told):
        await asyncio.wait_for(server.before.wait(), 10)
        begun = time.monotonic()
        await until(lambda: told.pulls[-1].at > begun + 3 * OPTIONS.adjustment_interval)
        assert (len(server.taken), told.decisions) == (1, [])
        server.may_end.set()
        await until(lambda: len(told.decisions) > 1)
    again, _ = told.decisions[1]
    assert again.at >= begun + 4 * OPTIONS.adjustment_interval, "a new interval begins after the action"


async def test_a_decision_is_recorded_though_the_planner_is_ended_meanwhile(server: FakeServer, told: Told) -> None:
    server.may_end.clear()
    async with planning(server, told):
        await asyncio.wait_for(server.before.wait(), 10)
    assert [(decision.actions, outcomes) for decision, outcomes in told.decisions] == [((ADD,), ())]


async def test_a_planner_that_only_observes_does_not_act(server: FakeServer, told: Told) -> None:
    async with planning(server, told, replace(OPTIONS, no_operation=True)):
        await until(lambda: len(told.decisions) > 1)
    assert server.taken == []
    assert {(decision.actions, outcomes) for decision, outcomes in told.decisions} == {((ADD,), ())}


async def test_an_action_that_fails_is_recorded_and_the_planner_goes_on(server: FakeServer, told: Told) -> None:
    server.raises = SupervisorError("circus does not answer")
    async with planning(server, told):
        await until(lambda: len(told.decisions) > 1)
    (_, outcomes), (again, none) = told.decisions[:2]
    assert (outcomes[0].done, outcomes[0].note) == (False, "circus does not answer")
    assert (again.actions, none) == ((), ())
    assert "but the last action failed" in again.text


async def test_a_worker_that_was_added_gives_dynamo_s_policy_three_intervals_of_grace(
    server: FakeServer, told: Told
) -> None:
    """The loop remembers what it added: two workers that are idle afterwards stay for three intervals."""
    options = replace(OPTIONS, policy="dynamo", prefill_queue_scale_up_threshold=5.0)
    two = pull(worker(kv=0.1), worker("VllmWorker_1", kv=0.1), prefiller(), queue=1)
    one = pull(worker(kv=0.95), prefiller(), queue=1)
    async with planning(server, told, options, fleet=lambda: two if server.taken else one):
        await until(lambda: len(told.decisions) > 4)
    assert [len(decision.actions) for decision, _ in told.decisions[:5]] == [1, 0, 0, 0, 1]


# Orders of numbers


@dataclass
class Turns:
    """A loop over endpoint `chat`, with 100 requests in flight at first."""

    server: FakeServer = field(default_factory=FakeServer)
    told: Told = field(default_factory=Told)
    options: PlannerOptions = SLOW
    in_flight: int | None = 100
    now: float = 0.0

    def __post_init__(self) -> None:
        server = self.server
        self.loop = PlannerLoop(
            self.options, self._pull, server.take_action, server.scale, [self.told], clock=lambda: self.now
        )

    async def _pull(self) -> Observation:
        self.now += 1.0
        return endpoints(seen(spec(), in_flight=self.in_flight), at=self.now)

    async def turn(self, number: int = 1) -> None:
        for _ in range(number):
            await self.loop.turn()


async def test_an_order_is_given_once_and_recorded_with_its_outcome() -> None:
    turns = Turns()
    await turns.turn(3)
    assert turns.server.given == [GROWN]
    decision, outcome = turns.told.decisions[0]
    assert (decision.order, outcome) == (GROWN, (OrderOutcome(True),))


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
    assert (decision.order, decision.acts, outcome) == (GROWN, False, ())
    assert len(turns.told.decisions) == 1


async def test_a_refused_order_is_recorded_and_tried_again_after_an_interval() -> None:
    turns = Turns(FakeServer(refuses="endpoint chat is being deleted"))
    await turns.turn(30)
    assert len(turns.server.given) == 1
    assert turns.told.decisions[0][1] == (OrderOutcome(False, "endpoint chat is being deleted"),)
    await turns.turn(2)
    assert len(turns.server.given) == 2


async def test_orders_of_several_endpoints_do_not_wait_for_each_other() -> None:
    """The second order is given although the first one is not answered yet."""
    orders: list[str] = []

    class Slow(FakeServer):
        async def scale(self, order: ScaleEndpoint) -> tuple[OrderOutcome, EndpointStatus | None]:
            orders.append(order.name)
            while len(orders) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            return await super().scale(order)

    slow = Slow()

    async def both() -> Observation:
        return endpoints(seen(spec(), in_flight=30), seen(spec("code"), in_flight=30))

    await PlannerLoop(SLOW, both, slow.take_action, slow.scale).turn()
    assert sorted(orders) == ["chat", "code"]


async def test_while_an_action_is_under_way_other_endpoints_are_scaled(server: FakeServer, told: Told) -> None:
    server.may_end.clear()
    chat = seen(spec(), in_flight=0)
    async with planning(server, told, replace(OPTIONS, max_gpu_budget=8), others=lambda: [chat]):
        await asyncio.wait_for(server.before.wait(), 10)
        chat = seen(spec(), in_flight=100)
        await until(lambda: server.given)
    assert server.given == [ScaleEndpoint("chat", 5)], "three of eight devices are the graph's own"
    assert [type(action) for action, _, _ in server.taken] == [AddWorker]
