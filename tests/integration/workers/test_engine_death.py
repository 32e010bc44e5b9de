"""Engines that die or hang under workers that live: what they had in hand goes on elsewhere, and they come back.

The workers' drain deadline is longer than any test waits, and no frontend here ever takes a silent worker for lost:
only the worker's own word gets a request off it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from components.workers.engine_service import StallWatch
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import EngineError
from dynamo_local.core.fleet.view import ENGINE_ROLES, PREFILL_ROLE, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.work import Submit
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.ports import Request
from dynamo_local.core.request.disaggregation import PrefillLimits
from dynamo_local.core.request.recovery import Survival
from dynamo_local.core.subjects import Subjects
from state.machine.processes import alive, start_time
from tests.integration.conftest import Connect
from tests.integration.disaggregation.prefill_fakes import ENDLESS, remote_prefill
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, request, until
from tests.integration.frontend.mocked_answers import FAST, Reader, asking_for, right
from tests.integration.server_process import ServerProcess
from tests.integration.workers.worker_parts import ScriptedEngine, Worker, context_of

pytestmark = pytest.mark.integration

NAMESPACE = "mortal"
LIMITS = PrefillLimits(max_local_prefill_length=400, max_prefill_queue_size=1000)
STALL_S = 3
KEYS = {
    "ServiceArgs.workers": 2,
    "engine": "mocker",
    "mocker-process": "true",
    "mocker-step-base-ms": 10,
    # A long prompt is prefilled for a while.
    "mocker-prefill-us-per-token": 1000,
    "stall-timeout-s": STALL_S,
    "drain-timeout-s": 10 * DEADLINE_S,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = [
        *("-m", "dynamo_local.cli.main", "serve", "tests.chaos.graph_disagg:Router", f"--namespace={NAMESPACE}"),
        *("--port=0", "--cpu-slots=4", "--restart-backoff-max=0.2"),
        *(f"--{service}.{key}={value}" for service in ("VllmWorker", "PrefillWorker") for key, value in KEYS.items()),
    ]
    with ServerProcess(tmp_path_factory.mktemp("mortal") / "state", NAMESPACE, arguments) as server:
        server.line("all services ready")
        yield server


@dataclass
class Fleet:
    """Two workers that decode and two that prefill, and a frontend of theirs."""

    front: FakeFrontend
    asked: dict[str, Request] = field(default_factory=dict)

    def workers(self) -> list[Presence]:
        return self.front.fleet.view.routable(ENGINE_ROLES)

    async def ready(self, without: str = "") -> None:
        """Wait until all workers are ready, none of them with the lease `without`."""
        await until(lambda: len(self.workers()) == 4 and all(worker.lease != without for worker in self.workers()))

    async def ask(self, number: int, prompt_tokens: int = 50, tokens: int = 200) -> None:
        rng = random.Random(f"{prompt_tokens} {number}")
        prompt = tuple(rng.choices(range(FAST.mocker_vocab_size), k=prompt_tokens))
        asked = request(f"r{number}", prompt, sampling=asking_for(tokens), max_tokens=tokens, survival=Survival())
        self.asked[asked.request_id] = asked
        await self.front.dispatcher.submit(asked)

    def all_right(self) -> dict[str, list[int]]:
        return {name: right(asked) for name, asked in self.asked.items()}

    def at(self, request_id: str) -> Presence | None:
        """The worker that has the request."""
        live = self.front.dispatcher.table.requests.get(request_id)
        return None if live is None or live.log.worker is None else self.front.fleet.view.get(live.log.worker)

    def lost(self, worker: Presence) -> list[bool]:
        """For each time that the worker left the fleet, whether it had failed."""
        return [c.failed for c in self.front.changes if c.what is Happened.LEFT and c.presence.lease == worker.lease]


def engine_of(worker: Presence) -> int:
    (pid,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    return int(pid)


# Workers in processes of their own


@pytest.fixture
async def fleet(server: ServerProcess) -> AsyncIterator[Fleet]:
    bus = await Bus.connect(BusAddress.load(server.paths.bus_file), name="test")
    remote = remote_prefill(ENDLESS, LIMITS)
    front = FakeFrontend(bus, Subjects(NAMESPACE, FIRST_OF_MAIN), f"f{bus.inbox()}".replace(".", ""), remote_of=remote)
    fleet = Fleet(await front.start())
    await fleet.ready()
    yield fleet
    await front.close()
    await bus.close()


async def streams(fleet: Fleet, reader: Reader) -> Presence:
    """Streams in the middle of their answers. Returns a worker that has some of them."""
    await reader.read(lambda: min(map(len, reader.found.values())) > 20)
    worker = fleet.at("r0")
    assert worker is not None
    return worker


@pytest.mark.parametrize("how", ["killed", "stopped", "killed while the worker drains"])
async def test_streams_go_on_when_an_engine_is(fleet: Fleet, how: str) -> None:
    # What drains is not left by moves here: it is to be the failure that they go on from.
    fleet.front.dispatcher.migrations.stop()
    for number in range(6):
        await fleet.ask(number)
    reader = Reader(fleet.front, fleet.asked)
    worker = await streams(fleet, reader)
    engine = engine_of(worker)
    processes = {pid: start_time(pid) or 0 for pid in (engine, worker.pid)}
    if "drains" in how:
        os.kill(worker.pid, signal.SIGTERM)
        await until(lambda: worker.lease not in [p.lease for p in fleet.workers()])
    os.kill(engine, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    assert await reader.read() == fleet.all_right()
    assert fleet.lost(worker) == [True]
    await until(lambda: not any(alive(pid, started) for pid, started in processes.items()))
    await fleet.ready(without=worker.lease)


async def test_a_prompt_is_prefilled_elsewhere_when_the_engine_that_is_at_it_dies(fleet: Fleet) -> None:
    await fleet.ask(0, prompt_tokens=1500, tokens=20)
    await until(lambda: (worker := fleet.at("r0")) is not None and worker.role == PREFILL_ROLE)
    worker = fleet.at("r0")
    assert worker is not None
    os.kill(engine_of(worker), signal.SIGKILL)
    assert await Reader(fleet.front, fleet.asked).read() == fleet.all_right()
    assert fleet.lost(worker) == [True]
    assert fleet.front.remote is not None
    assert fleet.front.remote.outcomes == {"long": 2, "prefilled elsewhere": 1}
    await fleet.ready(without=worker.lease)


async def test_an_idle_worker_whose_engine_dies_is_replaced(fleet: Fleet) -> None:
    worker = fleet.workers()[0]
    os.kill(engine_of(worker), signal.SIGKILL)
    await fleet.ready(without=worker.lease)
    assert fleet.lost(worker) == [True]


# The engine service alone


@pytest.fixture
async def hung(connect: Connect, subjects: Subjects, frontend: FakeFrontend) -> AsyncIterator[Worker]:
    """A worker that has just given its engine up, with one request of the frontend's."""
    context = context_of(await connect(), subjects, "VllmWorker", "aggregated", "w1")
    worker = await Worker(context, ScriptedEngine()).start()
    worker.service._stalls = StallWatch(context.announcer, worker.engine, 0.1)
    await until(lambda: bool(frontend.fleet.view.routable()))
    await frontend.dispatcher.submit(request(survival=Survival()))
    with pytest.raises(EngineError, match="has made no step for"):
        await asyncio.wait_for(worker.context.tasks.failed(), DEADLINE_S)
    yield worker
    await worker.context.tasks.close()


async def test_a_frontend_that_does_not_hear_that_a_worker_has_failed_asks_and_is_refused(
    hung: Worker, frontend: FakeFrontend, connect: Connect, subjects: Subjects
) -> None:
    live = frontend.dispatcher.table.requests["r1"]
    assert (live.log.worker, live.log.epoch) == ("w1", 1)
    frontend.dispatcher.retransmitter.ask_after_gap(live, 1e9)
    await until(lambda: live.log.epoch > 1 or live.log.worker is None)


async def test_a_worker_that_has_failed_takes_nothing_and_has_nothing_to_drain(hung: Worker) -> None:
    assert hung.service.abandoned
    await asyncio.wait_for(hung.service.drain(10 * DEADLINE_S), DEADLINE_S)
    watch = await hung.service.take(Submit("r2", 1, "f1", [1, 2, 3], msgspec.Raw(b"\x80")))
    assert watch.forgotten.is_set()
