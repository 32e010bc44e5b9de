"""Changing the role of a running worker: what it does from then on, who knows of it, and when it is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from components.workers.roles import Roles
from dynamo_local.bus.jetstream.prefill_queue import PrefillConsumer, PrefillQueue, create_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.cli.main import run
from dynamo_local.core.errors import EngineError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.admin import RoleAnswer, RoleQuestion
from dynamo_local.core.messages.work import PrefillJob, RequestEpoch
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.config.resolved import ResolvedService
from state.devices.allocation import cpu_slots
from state.statefile.model import Component
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, request, until
from tests.integration.server_process import ServerProcess, eventually
from tests.integration.workers.worker_parts import PrefillPart, ScriptedEngine, context_of

pytestmark = pytest.mark.integration

PREFILL_SERVICE = ResolvedService("PrefillWorker", "m:P", PREFILL_ROLE, 1, 0, 0.0, {}, {}, ())


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def queue(bus: Bus, subjects: Subjects) -> PrefillQueue:
    await create_prefill_queue(bus, subjects)
    return PrefillQueue(bus, subjects)


@pytest.fixture
async def worker(connect: Connect, subjects: Subjects, engine: ScriptedEngine) -> AsyncIterator[PrefillPart]:
    """Decodes, in a graph with a prefill service."""
    context = context_of(await connect(), subjects, "VllmWorker", "decode", "w")
    context.graph = msgspec.structs.replace(context.graph, services=(*context.graph.services, PREFILL_SERVICE))
    worker = await PrefillPart(context, engine).start()
    yield worker
    await worker.close()


@pytest.fixture
async def roles(worker: PrefillPart) -> Roles:
    roles = Roles(worker.context, worker.prefill)
    await roles.start()
    await worker.context.bus.flush()
    return roles


async def ask(bus: Bus, subjects: Subjects, role: str) -> RoleAnswer:
    return await bus.ask(subjects.role("w"), RoleQuestion(role), RoleAnswer, timeout_s=DEADLINE_S)


def takes_jobs(worker: PrefillPart) -> bool:
    return worker.prefill.is_on


async def publish(queue: PrefillQueue, request_id: str) -> None:
    await queue.publish(PrefillJob(request_id, request_id, "nobody", 3, 3600.0))


async def test_a_worker_takes_jobs_for_as_long_as_it_prefills(
    bus: Bus, subjects: Subjects, queue: PrefillQueue, worker: PrefillPart, roles: Roles
) -> None:
    assert not takes_jobs(worker)
    assert await ask(bus, subjects, PREFILL_ROLE) == RoleAnswer(PREFILL_ROLE)
    assert takes_jobs(worker)
    await publish(queue, "first")
    async with asyncio.timeout(DEADLINE_S):
        # It may be done already: nobody grants its claim.
        while (await queue.length()).waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await ask(bus, subjects, "decode") == RoleAnswer("decode")
    assert not takes_jobs(worker)
    await publish(queue, "second")
    consumer = PrefillConsumer(bus, subjects)
    left: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        while "second" not in left:
            # The first one too, if the worker had not begun it: then it was given back.
            left += [job.job.request_id for job in await consumer.take(1, DEADLINE_S)]
    await consumer.close()
    assert roles.role == "decode"


async def test_a_worker_started_to_prefill_does(connect: Connect, subjects: Subjects, engine: ScriptedEngine) -> None:
    worker = await PrefillPart(
        context_of(await connect(), subjects, "PrefillWorker", PREFILL_ROLE, "w"), engine
    ).start()
    roles = Roles(worker.context, worker.prefill)
    await roles.start()
    assert takes_jobs(worker)
    await roles.stop()
    assert not takes_jobs(worker)
    await worker.close()


async def test_frontends_learn_of_it_and_what_is_in_hand_is_finished(
    frontend: FakeFrontend, bus: Bus, subjects: Subjects, worker: PrefillPart, roles: Roles, engine: ScriptedEngine
) -> None:
    view = frontend.fleet.view
    await until(lambda: [p.lease for p in view.routable()] == ["w"])
    await frontend.dispatcher.submit(request())
    await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)
    await ask(bus, subjects, PREFILL_ROLE)
    await until(lambda: [p.lease for p in view.routable((PREFILL_ROLE,))] == ["w"])
    assert view.routable() == []
    assert engine.cancelled.empty()
    await frontend.dispatcher.cancel(["r1"])
    assert await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S) == RequestEpoch("r1", 1)


async def test_the_role_that_it_has_is_no_change(bus: Bus, subjects: Subjects, roles: Roles) -> None:
    assert await ask(bus, subjects, "decode") == RoleAnswer("decode")
    assert roles.role == "decode"


@pytest.mark.parametrize("role", ["aggregated", "frontend", "", "Prefill"])
async def test_a_role_that_there_is_not_is_refused(bus: Bus, subjects: Subjects, roles: Roles, role: str) -> None:
    answer = await ask(bus, subjects, role)
    assert answer.role == "decode"
    assert answer.refused is not None
    assert repr(role) in answer.refused
    assert roles.role == "decode"


async def test_without_a_prefill_service_there_is_no_queue_to_take_from(
    bus: Bus, subjects: Subjects, worker: PrefillPart, roles: Roles
) -> None:
    graph = worker.context.graph
    worker.context.graph = msgspec.structs.replace(graph, services=graph.services[:1])
    answer = await ask(bus, subjects, PREFILL_ROLE)
    assert (answer.role, "no prefill workers" in (answer.refused or "")) == ("decode", True)
    assert not takes_jobs(worker)


async def test_an_engine_whose_kv_nobody_can_read_does_not_prefill_for_others(
    bus: Bus, subjects: Subjects, worker: PrefillPart, roles: Roles
) -> None:
    info = worker.context.announcer.presence.engine
    assert info is not None
    worker.context.announcer.update(engine=msgspec.structs.replace(info, no_transfer="it is switched off"))
    answer = await ask(bus, subjects, PREFILL_ROLE)
    assert (answer.role, "it is switched off" in (answer.refused or "")) == ("decode", True)
    assert (takes_jobs(worker), roles.role) == (False, "decode")


async def test_a_worker_started_to_prefill_on_such_an_engine_says_so_and_ends(
    connect: Connect, subjects: Subjects
) -> None:
    context = context_of(await connect(), subjects, "PrefillWorker", PREFILL_ROLE, "w")
    worker = await PrefillPart(context, ScriptedEngine(no_transfer="it is switched off")).start()
    with pytest.raises(EngineError, match="it is switched off"):
        await Roles(context, worker.prefill).start()
    assert not takes_jobs(worker)
    await worker.close()


async def test_a_worker_that_ends_takes_up_nothing(
    bus: Bus, subjects: Subjects, worker: PrefillPart, roles: Roles
) -> None:
    await roles.stop()
    answer = await ask(bus, subjects, PREFILL_ROLE)
    assert (answer.role, answer.refused) == ("decode", "the worker is ending")
    assert not takes_jobs(worker)
    assert roles.role == "decode"


async def test_garbage_is_not_answered_and_harms_nothing(bus: Bus, subjects: Subjects, roles: Roles) -> None:
    await bus.publish(subjects.role("w"), b"\xc1", reply=bus.inbox())
    assert await ask(bus, subjects, PREFILL_ROLE) == RoleAnswer(PREFILL_ROLE)


# A real server


def test_dynamo_role_changes_a_running_worker_and_a_restart_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_CPU_SLOTS", "2")
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))

    def dynamo(*arguments: str) -> tuple[int, str]:
        code = run([*arguments, "--namespace=roles"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    arguments = [
        "-m",
        "dynamo_local.cli.main",
        "serve",
        "tests.integration.supervisor.roles_graph:Front",
        "--namespace=roles",
        "--port=0",
    ]
    engines = ["--VllmWorker.engine=mocker", "--PrefillWorker.engine=mocker"]
    with ServerProcess(tmp_path, "roles", [*arguments, *engines]) as server:
        server.line("all services ready")

        def entry_of(service: str) -> Component:
            return server.state().components[f"roles_{service}"]

        assert (entry_of("VllmWorker").role, entry_of("PrefillWorker").role) == ("decode", "prefill")
        slots = [set(device.cores) for device in cpu_slots(sorted(os.sched_getaffinity(0)), 2).devices]
        decoding = slots[entry_of("VllmWorker").devices[0]]

        def beside_the_decoding(service: str) -> bool:
            everywhere = os.sched_getaffinity(0)
            return os.sched_getaffinity(server.pid(service)) == (everywhere - decoding or everywhere)

        others = ("Front", "VllmWorker", "Nats")
        eventually(lambda: all(map(beside_the_decoding, others)), "somebody else is on the decoding core")
        code, said = dynamo("role", "roles_VllmWorker", "prefill")
        assert (code, "the only one that decodes" in said) == (2, True)
        code, said = dynamo("role", "roles_Front", "prefill")
        assert (code, "there are: VllmWorker, PrefillWorker" in said) == (2, True)
        before = server.pid("PrefillWorker")
        assert dynamo("role", "roles_PrefillWorker", "decode") == (0, "roles_PrefillWorker: decode\n")
        decoding = slots[0] | slots[1]
        eventually(lambda: beside_the_decoding("Front"), "it keeps off cores that all decode now")
        assert (entry_of("PrefillWorker").role, server.pid("PrefillWorker")) == ("decode", before)
        code, said = dynamo("role", "roles_VllmWorker", "prefill", "--json")
        assert (code, json.loads(said)) == (0, {"watcher": "roles_VllmWorker", "role": "prefill"})
        old = server.pid("VllmWorker")
        os.kill(old, signal.SIGKILL)
        eventually(lambda: entry_of("VllmWorker").pid not in (None, old), "there is no worker in its place")
        assert entry_of("VllmWorker").role == "prefill"
        # It knows that, and can be asked for another one.
        eventually(lambda: dynamo("role", "roles_VllmWorker", "decode")[0] == 0, "it is not ready")
        assert entry_of("VllmWorker").role == "decode"
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        server.assert_nothing_left()
