"""The planner's loop with fake pulls, a fake actuator and virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dynamo_local.core.errors import ConfigError, NotRunningError, SupervisorError
from dynamo_local.core.planning.actions import Action, ActionOutcome, AddWorker, DeviceLimits
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.observation import Observation
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.planner.decision_log import DecisionLog
from dynamo_local.planner.loop import PlannerLoop
from tests.unit.core.planning.fleets import prefiller, pull, worker

OPTIONS = PlannerOptions(adjustment_interval=0.03, metric_pulling_interval=0.01, max_gpu_budget=4)
ADD = AddWorker("decode", "VllmWorker")


@dataclass
class FakeActuator:
    """An actuator that applies actions, or raises as it is set to."""

    raises: Exception | None = None
    applied: list[tuple[Action, DeviceLimits]] = field(default_factory=list)
    reconciled: int = 0
    before: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an action begins."""
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def apply(self, action: Action, limits: DeviceLimits) -> ActionOutcome:
        self.applied.append((action, limits))
        self.before.set()
        await self.may_end.wait()
        if self.raises is not None:
            raise self.raises
        return ActionOutcome(action, True, "ns_VllmWorker_1", "ready", 1.0)

    async def reconcile(self) -> tuple[str, ...]:
        self.reconciled += 1
        return ()


@dataclass
class Told:
    """A recorder that keeps what it receives."""

    pulls: list[Observation] = field(default_factory=list)
    decisions: list[tuple[Decision, tuple[ActionOutcome, ...]]] = field(default_factory=list)

    def observed(self, observation: Observation) -> None:
        self.pulls.append(observation)

    def decided(self, decision: Decision, outcomes: Sequence[ActionOutcome]) -> None:
        self.decisions.append((decision, tuple(outcomes)))

    def close(self) -> None:
        pass


async def busy() -> Observation:
    return pull(worker(kv=0.95), prefiller(busy=True))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def actuator() -> FakeActuator:
    actuator = FakeActuator()
    actuator.may_end.set()
    return actuator


async def test_an_interval_is_watched_decided_on_acted_on_and_recorded(actuator: FakeActuator, told: Told) -> None:
    begun: list[Action | None] = []
    decision = await PlannerLoop(OPTIONS, busy, actuator, [told], begun.append).adjust()
    assert decision.actions == (ADD,)
    assert actuator.applied == [(ADD, DeviceLimits(4))]
    assert len(told.pulls) >= 2
    assert told.decisions == [(decision, (ActionOutcome(ADD, True, "ns_VllmWorker_1", "ready", 1.0),))]
    assert begun == [ADD, None]


async def test_nothing_is_pulled_while_an_action_is_under_way(actuator: FakeActuator, told: Told) -> None:
    actuator.may_end.clear()
    adjusting = asyncio.create_task(PlannerLoop(OPTIONS, busy, actuator, [told]).adjust())
    await asyncio.wait_for(actuator.before.wait(), 10)
    pulled = len(told.pulls)
    await asyncio.sleep(OPTIONS.metric_pulling_interval * 3)
    assert len(told.pulls) == pulled
    actuator.may_end.set()
    await asyncio.wait_for(adjusting, 10)


async def test_a_decision_is_recorded_though_the_planner_is_ended_meanwhile(actuator: FakeActuator, told: Told) -> None:
    actuator.may_end.clear()
    adjusting = asyncio.create_task(PlannerLoop(OPTIONS, busy, actuator, [told]).adjust())
    await asyncio.wait_for(actuator.before.wait(), 10)
    adjusting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adjusting
    assert [(decision.actions, outcomes) for decision, outcomes in told.decisions] == [((ADD,), ())]


async def test_a_planner_that_only_observes_does_not_act(actuator: FakeActuator, told: Told) -> None:
    options = PlannerOptions(adjustment_interval=0.01, metric_pulling_interval=0.01, no_operation=True)
    planner = asyncio.create_task(PlannerLoop(options, busy, actuator, [told]).run())
    async with asyncio.timeout(10):
        while not told.decisions:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    planner.cancel()
    assert (actuator.applied, actuator.reconciled) == ([], 0)
    assert told.decisions[0][0].actions == (ADD,)
    assert told.decisions[0][1] == ()


async def test_an_action_that_fails_is_recorded_and_the_planner_goes_on(actuator: FakeActuator, told: Told) -> None:
    actuator.raises = SupervisorError("circus does not answer")
    planner = PlannerLoop(OPTIONS, busy, actuator, [told])
    await planner.adjust()
    await planner.adjust()
    (_, outcomes), (again, none) = told.decisions
    assert (outcomes[0].done, outcomes[0].note) == (False, "circus does not answer")
    assert (again.actions, none) == ((), ())
    assert "but the last action failed" in again.text


async def test_the_server_is_reconciled_first(actuator: FakeActuator) -> None:
    async def ended() -> Observation:
        assert actuator.reconciled == 1
        raise NotRunningError("the server has ended")

    with pytest.raises(NotRunningError):
        await PlannerLoop(OPTIONS, ended, actuator).run()


async def test_a_worker_that_was_added_gives_dynamo_s_policy_three_intervals_of_grace(actuator: FakeActuator) -> None:
    """The loop remembers what it added: two workers that are idle afterwards stay for three intervals."""
    options = replace(OPTIONS, policy="dynamo", prefill_queue_scale_up_threshold=5.0)
    two = (worker(kv=0.1), worker("VllmWorker_1", kv=0.1), prefiller())
    seen = [pull(worker(kv=0.95), prefiller(), queue=1)]

    async def next_pull() -> Observation:
        return seen[-1]

    planner = PlannerLoop(options, next_pull, actuator)
    assert (await planner.adjust()).actions == (ADD,)
    seen.append(pull(*two, queue=1))
    actions = [len((await planner.adjust()).actions) for _ in range(4)]
    assert actions == [0, 0, 0, 1]


# Decisions on disk


def decided_on(actions: tuple[Action, ...] = (ADD,)) -> Decision:
    return Decision(10.0, "load", (), actions, 2, 4)


def test_a_decision_is_a_line_of_json(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "new" / "decisions.jsonl", {"model": "m"}, wall_clock=lambda: 5.0)
    log.decided(decided_on(), (ActionOutcome(ADD, False, None, "no", 1.23456),))
    log.decided(decided_on(()), ())
    first, second = map(json.loads, log.path.read_text().splitlines())
    assert (first["time"], first["model"], first["policy"], first["devices"]) == (5.0, "m", "load", 2)
    assert first["actions"] == [{"action": "AddWorker", "role": "decode", "component": "VllmWorker"}]
    assert first["outcomes"] == [
        {"action": "add a decode worker", "done": False, "watcher": None, "note": "no", "took_s": 1.235}
    ]
    assert (second["actions"], second["outcomes"]) == ([], [])
    assert log.path.stat().st_mode & 0o077 == 0


def test_the_log_takes_a_bounded_place_on_disk(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl", {}, max_bytes=1000)
    for _ in range(50):
        log.decided(decided_on(), ())
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["decisions.jsonl", "decisions.jsonl.1"]
    assert all(0 < file.stat().st_size <= 1000 for file in files)
    assert all(json.loads(line) for file in files for line in file.read_text().splitlines())


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write decisions"):
        DecisionLog(tmp_path / "file" / "decisions.jsonl", {})
