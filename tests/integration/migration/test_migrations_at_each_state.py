"""Each fault in the middle of migrations, at each of their states, with processes that really die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import FleetView
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.work import CancelReservation, MigrationAnswer, Reserve
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from tests.chaos.answers import Outcome
from tests.integration.fleet_of_fakes import DEADLINE_S, until
from tests.integration.migration.held_migrations import HoldingBus, State
from tests.integration.migration.migration_scene import Scene
from tests.integration.server_process import ServerProcess

pytestmark = pytest.mark.integration

NAMESPACE = "held"
WORKERS = 3
SUBJECTS = Subjects(NAMESPACE, FIRST_OF_MAIN)
KEYS = {
    "ServiceArgs.workers": WORKERS,
    "engine": "mocker",
    "mocker-process": "true",
    "mocker-step-base-ms": 6,
    "mocker-kv-blocks": 512,
    "mocker-block-size": 16,
    "mocker-transfer-base-ms": 50,
    # A reader that dies does not say that it has read.
    "mocker-longest-pin-s": 2,
    "drain-timeout-s": 20,
}

STAYS = (State.RESERVED, State.PULLING, State.WARM, State.AGAIN)
"""Before the cut."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = [
        *("-m", "dynamo_local.cli.main", "serve", "tests.chaos.graph:Router", f"--namespace={NAMESPACE}", "--port=0"),
        *(f"--cpu-slots={WORKERS}", "--restart-backoff-max=0.2"),
        *(f"--VllmWorker.{key}={value}" for key, value in KEYS.items()),
    ]
    with ServerProcess(tmp_path_factory.mktemp("held") / "state", NAMESPACE, arguments) as server:
        server.line("all services ready", within_s=120)
        yield server


@dataclass
class Stage:
    """The fleet, and what is done to it."""

    server: ServerProcess
    bus: Bus
    fleet: FleetWatch
    tasks: TaskGuard

    @property
    def view(self) -> FleetView:
        return self.fleet.view

    async def workers(self) -> list[Presence]:
        """When all of them are there and hold nothing."""
        await until(lambda: len(self.view.routable()) == WORKERS and all(map(_holds_nothing, self.view.routable())))
        workers = self.view.routable()
        async with asyncio.timeout(DEADLINE_S):
            for worker in workers:
                while not await self._has_all_its_room(worker):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        return workers

    async def _has_all_its_room(self, worker: Presence) -> bool:
        """Whether no room is reserved: all of it can be."""
        assert worker.engine is not None
        subject, tokens = SUBJECTS.migrations(worker.lease), worker.engine.kv_blocks * worker.engine.block_size - 1
        question = Reserve("probe", "nobody", tokens, DEADLINE_S)
        answer = await self.bus.ask(subject, question, MigrationAnswer, timeout_s=DEADLINE_S)
        await self.bus.send(subject, CancelReservation("probe"))
        return answer.refused is None

    async def scene(self) -> Scene:
        """All migrations have stopped."""
        source, destination, _ = await self.workers()
        bus = await HoldingBus.connect(BusAddress.load(self.server.paths.bus_file), name="scene")
        assert isinstance(bus, HoldingBus)
        return await Scene(bus, SUBJECTS, source.lease, destination.lease).set(self.bus)

    def signal(self, lease: str, number: signal.Signals, *, engine: bool = False) -> None:
        worker = self.view.get(lease)
        assert worker is not None
        os.kill(engine_of(worker) if engine else worker.pid, number)

    async def all_answered(self, scene: Scene) -> dict[State, str]:
        """Each request once, rightly; and nothing is left of any, anywhere. Returns how the migrations ended."""
        await scene.ended()
        found = {name: (answer.outcome, answer.reason) for name, answer in scene.answers.items()}
        assert {outcome for outcome, _ in found.values()} <= {Outcome.RIGHT, Outcome.LEFT}, found
        outcomes = await scene.outcomes()
        await self.workers()
        assert scene.front.dispatcher.live_requests == 0
        assert scene.front.local.ledger.of_frontend(scene.front.lease) == ()
        await scene.front.close()
        await scene.bus.close()
        return outcomes


def engine_of(worker: Presence) -> int:
    """The pid of a mocker's process."""
    (pid,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    return int(pid)


def _is_full(worker: Presence | None) -> bool:
    return worker is not None and worker.load is not None and bool(worker.load.waiting)


def _holds_nothing(worker: Presence) -> bool:
    load = worker.load
    return load is not None and not any((load.running, load.waiting, load.kv_usage, load.kv_pinned))


@pytest.fixture
async def stage(server: ServerProcess) -> AsyncIterator[Stage]:
    bus = await Bus.connect(BusAddress.load(server.paths.bus_file), name="test")
    stage = Stage(server, bus, FleetWatch(bus, SUBJECTS), TaskGuard())
    await stage.fleet.start()
    stage.tasks.spawn("fleet", stage.fleet.run())
    yield stage
    await stage.tasks.close()
    await bus.close()


def became(outcomes: dict[State, str], before: str) -> None:
    """How the migrations have ended that had not been cut, unless the requests were over first. What was cut is the
    destination's, or asked after and recovered if it was held for long."""
    assert {outcomes.pop(state) for state in STAYS} <= {before, "ended"}
    assert set(outcomes.values()) <= {"migrated", "recovered", "ended"}


@pytest.mark.parametrize("engine", [False, True], ids=["worker", "engine"])
@pytest.mark.parametrize(("which", "migrations"), [("source", "recovered"), ("destination", "stayed")])
async def test_a_worker_that_is_killed_and_missed(stage: Stage, which: str, migrations: str, engine: bool) -> None:
    scene = await stage.scene()
    lost = getattr(scene, which)
    stage.signal(lost, signal.SIGKILL, engine=engine)
    # It has said that it has failed, or another process has taken its place.
    await until(lambda: scene.front.fleet.view.get(lost) is None)
    scene.bus.let_go()
    became(await stage.all_answered(scene), migrations)


@pytest.mark.parametrize("which", ["source", "destination", "both"])
async def test_workers_that_are_killed_and_not_missed_yet(stage: Stage, which: str) -> None:
    scene = await stage.scene()
    for lost in (scene.source, scene.destination) if which == "both" else (getattr(scene, which),):
        stage.signal(lost, signal.SIGKILL)
    scene.bus.let_go()
    await stage.all_answered(scene)


async def test_a_router_that_is_killed(stage: Stage) -> None:
    scene = await stage.scene()
    os.kill(stage.server.pid("Router"), signal.SIGKILL)
    scene.bus.let_go()
    became(await stage.all_answered(scene), "migrated")


async def test_a_bus_that_is_killed(stage: Stage) -> None:
    scene = await stage.scene()
    os.kill(stage.server.pid("Nats"), signal.SIGKILL)
    await until(lambda: not scene.bus.connected)
    scene.bus.let_go()
    await stage.all_answered(scene)


async def test_clients_that_leave(stage: Stage) -> None:
    scene = await stage.scene()
    await scene.leave()
    scene.bus.let_go()
    outcomes = await stage.all_answered(scene)
    # Its first token may have come from the destination while the source was not told yet.
    assert outcomes.pop(State.SUBMITTED) in ("ended", "migrated")
    assert set(outcomes.values()) == {"ended"}


async def test_requests_that_end(stage: Stage) -> None:
    scene = await stage.scene()
    await scene.ended(STAYS)
    scene.bus.let_go()
    became(await stage.all_answered(scene), "ended")


@pytest.mark.parametrize("which", ["source", "destination"])
async def test_a_worker_that_is_told_to_end(stage: Stage, which: str) -> None:
    scene = await stage.scene()
    lease = getattr(scene, which)
    stage.signal(lease, signal.SIGTERM)
    await until(lambda: all(p.lease != lease for p in scene.front.fleet.view.routable()))
    scene.bus.let_go()
    became(await stage.all_answered(scene), "migrated" if which == "source" else "stayed")


async def test_a_worker_that_is_told_to_end_while_all_others_die(stage: Stage) -> None:
    scene = await stage.scene()
    stage.signal(scene.source, signal.SIGTERM)
    for worker in stage.view.routable():
        if worker.lease != scene.source:
            stage.signal(worker.lease, signal.SIGKILL)
    scene.bus.let_go()
    await stage.all_answered(scene)


@pytest.mark.parametrize("which", ["source", "destination"])
async def test_a_worker_that_fills_up(stage: Stage, which: str) -> None:
    """Others come first there: migrating requests are preempted, or wait for blocks."""
    scene = await stage.scene()
    crowd = await scene.crowd(getattr(scene, which))
    await until(lambda: _is_full(stage.view.get(crowd.worker)))
    scene.bus.let_go()
    await crowd.ended()
    await stage.all_answered(scene)


async def test_a_frontend_that_is_killed(stage: Stage) -> None:
    source, destination, _ = await stage.workers()
    arguments = (str(stage.server.paths.bus_file), NAMESPACE, source.lease, destination.lease)
    frontend = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.migration.migration_scene", *arguments),
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert frontend.stdout is not None
    assert await frontend.stdout.readline() == b"stopped\n"
    await until(lambda: not all(map(_holds_nothing, stage.view.routable())))
    frontend.kill()
    await frontend.wait()
    # All its requests, room, blocks and pins.
    await stage.workers()
