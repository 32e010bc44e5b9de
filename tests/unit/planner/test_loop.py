"""The planner's loop with fake pulls, a fake server and virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dynamo_local.core.errors import ConfigError, SupervisorError
from dynamo_local.core.planning.actions import Action, ActionOutcome, AddWorker, DeviceLimits
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import Observation
from dynamo_local.planner.decision_log import DecisionLog
from dynamo_local.planner.loop import PlannerLoop
from tests.unit.core.planning.fleets import prefiller, pull, worker

OPTIONS = PlannerOptions(adjustment_interval=0.03, metric_pulling_interval=0.01, max_gpu_budget=4)
ADD = AddWorker("decode", "VllmWorker")


@dataclass
class FakeServer:
    """A server that carries out actions, or raises as it is set to."""

    raises: Exception | None = None
    taken: list[tuple[Action, DeviceLimits, str]] = field(default_factory=list)
    before: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an action begins."""
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def take_action(self, action: Action, limits: DeviceLimits, why: str) -> ActionOutcome:
        self.taken.append((action, limits, why))
        self.before.set()
        await self.may_end.wait()
        if self.raises is not None:
            raise self.raises
        return ActionOutcome(action, True, "ns_VllmWorker_1", "ready", 1.0)


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
def server() -> FakeServer:
    server = FakeServer()
    server.may_end.set()
    return server


async def test_an_interval_is_watched_decided_on_acted_on_and_recorded(server: FakeServer, told: Told) -> None:
    begun: list[Action | None] = []
    decision = await PlannerLoop(OPTIONS, busy, server.take_action, [told], begun.append).adjust()
    assert decision.actions == (ADD,)
    assert server.taken == [(ADD, DeviceLimits(4), decision.reasons)]
    assert len(told.pulls) >= 2
    assert told.decisions == [(decision, (ActionOutcome(ADD, True, "ns_VllmWorker_1", "ready", 1.0),))]
    assert begun == [ADD, None]


async def test_nothing_is_pulled_while_an_action_is_under_way(server: FakeServer, told: Told) -> None:
    server.may_end.clear()
    adjusting = asyncio.create_task(PlannerLoop(OPTIONS, busy, server.take_action, [told]).adjust())
    await asyncio.wait_for(server.before.wait(), 10)
    pulled = len(told.pulls)
    await asyncio.sleep(OPTIONS.metric_pulling_interval * 3)
    assert len(told.pulls) == pulled
    server.may_end.set()
    await asyncio.wait_for(adjusting, 10)


async def test_a_decision_is_recorded_though_the_planner_is_ended_meanwhile(server: FakeServer, told: Told) -> None:
    server.may_end.clear()
    adjusting = asyncio.create_task(PlannerLoop(OPTIONS, busy, server.take_action, [told]).adjust())
    await asyncio.wait_for(server.before.wait(), 10)
    adjusting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adjusting
    assert [(decision.actions, outcomes) for decision, outcomes in told.decisions] == [((ADD,), ())]


async def test_a_planner_that_only_observes_does_not_act(server: FakeServer, told: Told) -> None:
    options = PlannerOptions(adjustment_interval=0.01, metric_pulling_interval=0.01, no_operation=True)
    planner = asyncio.create_task(PlannerLoop(options, busy, server.take_action, [told]).run())
    async with asyncio.timeout(10):
        while not told.decisions:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    planner.cancel()
    assert server.taken == []
    assert told.decisions[0][0].actions == (ADD,)
    assert told.decisions[0][1] == ()


async def test_an_action_that_fails_is_recorded_and_the_planner_goes_on(server: FakeServer, told: Told) -> None:
    server.raises = SupervisorError("circus does not answer")
    planner = PlannerLoop(OPTIONS, busy, server.take_action, [told])
    await planner.adjust()
    await planner.adjust()
    (_, outcomes), (again, none) = told.decisions
    assert (outcomes[0].done, outcomes[0].note) == (False, "circus does not answer")
    assert (again.actions, none) == ((), ())
    assert "but the last action failed" in again.text


async def test_a_worker_that_was_added_gives_dynamo_s_policy_three_intervals_of_grace(server: FakeServer) -> None:
    """The loop remembers what it added: two workers that are idle afterwards stay for three intervals."""
    options = replace(OPTIONS, policy="dynamo", prefill_queue_scale_up_threshold=5.0)
    two = (worker(kv=0.1), worker("VllmWorker_1", kv=0.1), prefiller())
    seen = [pull(worker(kv=0.95), prefiller(), queue=1)]

    async def next_pull() -> Observation:
        return seen[-1]

    planner = PlannerLoop(options, next_pull, server.take_action)
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
