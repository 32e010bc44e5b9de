"""The engine service between a real bus and an engine: the mocker, or one that does what the test says."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import msgspec
import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.errors import AdapterError, EngineError, RequestError
from dynamo_local.core.messages.presence import ClassUsage, Load, Presence
from dynamo_local.core.messages.work import Array, Logprobs, RequestEpoch, TokenDelta
from dynamo_local.core.ports import Engine, Sampling, Step
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.mocker.tokens import continuation
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, PATIENT, FakeFrontend, request, until
from tests.integration.workers.worker_parts import ScriptedEngine, Worker, context_of, start_router

pytestmark = pytest.mark.integration

FAST = MockerSettings(mocker_speedup=1000.0)
SLOW = MockerSettings(mocker_step_base_ms=20.0)

StartEngine = Callable[[Engine, str], Awaitable[Worker]]


@pytest.fixture
async def work_for(connect: Connect, subjects: Subjects) -> AsyncIterator[StartEngine]:
    """Starts a worker with the given engine and lease."""
    workers: list[Worker] = []

    async def start(engine: Engine, lease: str) -> Worker:
        context = context_of(await connect(), subjects, "VllmWorker", "aggregated", lease)
        workers.append(await Worker(context, engine).start())
        return workers[-1]

    yield start
    for worker in workers:
        await worker.close()


@pytest.fixture
async def engine(frontend: FakeFrontend, work_for: StartEngine) -> ScriptedEngine:
    """The engine of the one worker, which the frontend knows; the frontend announces itself."""
    engine = ScriptedEngine()
    await work_for(engine, "w1")
    await until(lambda: bool(frontend.fleet.view.routable()))
    return engine


async def announce(bus: Bus, subjects: Subjects, lease: str = "f1") -> None:
    presence = Presence(f"{subjects.namespace}_Frontend", "Frontend", "frontend", lease, 1, "ready")
    await bus.publish(subjects.presence(presence.watcher, presence.role), codec.encode(presence))


def asking_for(tokens: int) -> Sampling:
    def sampling(position: int, at_most: int | None = None) -> bytes:
        limit = tokens - position if at_most is None else min(at_most, tokens - position)
        return msgspec.msgpack.encode({"max_tokens": limit, "ignore_eos": True})

    return sampling


def delta(request_id: str, position: int, *token_ids: int, **more: object) -> TokenDelta:
    return TokenDelta(request_id, 1, position, list(token_ids), **more)  # type: ignore[arg-type]


# The mocker


async def test_every_request_gets_its_own_tokens_from_the_workers(
    frontend: FakeFrontend, work_for: StartEngine
) -> None:
    await work_for(MockerEngine(FAST), "w1")
    await work_for(MockerEngine(FAST), "w2")
    await until(lambda: len(frontend.fleet.view.routable()) == 2)
    prompts = {f"r{n}": (n, n + 1, n + 2) for n in range(20)}
    for request_id, prompt in prompts.items():
        await frontend.dispatcher.submit(request(request_id, prompt, sampling=asking_for(12)))
    answers: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    finished: set[str] = set()
    while len(finished) < len(prompts):
        outputs = await asyncio.wait_for(frontend.dispatcher.outputs(), DEADLINE_S)
        for one in outputs.deltas:
            assert one.position == len(answers[one.request_id])
            answers[one.request_id] += one.token_ids
            if one.finish is not None:
                assert one.finish == "length"
                finished.add(one.request_id)
    assert answers == {r: continuation(p, 12, FAST.mocker_vocab_size) for r, p in prompts.items()}
    assert frontend.dispatcher.live_requests == 0


async def test_a_cancelled_request_gives_its_blocks_back(frontend: FakeFrontend, work_for: StartEngine) -> None:
    worker = await work_for(MockerEngine(SLOW), "w1")

    def load() -> Load:
        return worker.context.announcer.presence.load or Load()

    await until(lambda: bool(frontend.fleet.view.routable()))
    await frontend.dispatcher.submit(request(sampling=asking_for(5000)))
    await until(lambda: load().running == 1 and (load().kv_usage or 0) > 0)
    await frontend.dispatcher.cancel(["r1"])
    await until(lambda: load().running == 0 and load().kv_usage == 0)


async def test_a_worker_without_requests_is_known_to_be_idle(frontend: FakeFrontend, work_for: StartEngine) -> None:
    """Though its engine makes no step, and told of a request that is gone, if of anything."""
    engine = ScriptedEngine()
    worker = await work_for(engine, "w1")

    def load() -> Load:
        found = worker.context.announcer.presence.load
        assert found is not None
        return found

    first = load()
    assert (first.running, first.waiting, first.kv_usage) == (0, 0, 0.0)
    await until(lambda: (load().at or 0) > (first.at or 0))
    await until(lambda: bool(frontend.fleet.view.routable()))
    await frontend.dispatcher.submit(request())
    await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)
    engine.steps.put_nowait(Step(12.5, (), Load(1, 0, 0.25, 0.5)))
    # Told with the time of its step, and not repeated as if it were new while the request runs.
    classes = (ClassUsage("normal", 1, len(request().prompt_token_ids)),)
    queue = {"head_tokens": 0, "by_class": classes, "preempted_tokens": 0, "recomputed_tokens": 0}
    told = msgspec.structs.replace(Load(1, 0, 0.25, 0.5, at=12.5), **queue)
    await until(lambda: load() == told)
    await frontend.dispatcher.cancel(["r1"])
    await until(lambda: load().running == 0)
    assert (load().kv_usage, load().kv_pinned) == (0.0, 0.5)
    assert (load().at or 0) > (first.at or 0)


async def test_the_router_spreads_what_several_frontends_ask(
    connect: Connect, subjects: Subjects, routed: FakeFrontend, work_for: StartEngine
) -> None:
    router = await start_router(context_of(await connect(), subjects, "Router", "router", "router"))
    engines = [ScriptedEngine(), ScriptedEngine()]
    for number, engine in enumerate(engines):
        await work_for(engine, f"w{number}")
    other = await FakeFrontend(await connect(), subjects, "f2", assigner_of=routed.assigner_of).start()
    for number, frontend in enumerate((routed, other)):
        await until(lambda frontend=frontend: len(frontend.fleet.view.routable()) == 2)  # type: ignore[misc]
        await frontend.dispatcher.submit(request(f"r{number}"))
        await until(lambda: sum(engine.submitted.qsize() for engine in engines) > number)  # noqa: B023
    # Each frontend for itself would have begun with the same worker.
    assert [engine.submitted.qsize() for engine in engines] == [1, 1]
    await other.close()
    await router.close()


# Whatever else happens


async def test_a_request_that_the_engine_cannot_take_fails_alone(
    frontend: FakeFrontend, engine: ScriptedEngine
) -> None:
    for error, told in ((RequestError("too long"), "too long"), (ValueError("?"), "the engine could not")):
        engine.submit_raises = error
        await frontend.dispatcher.submit(request())
        failure = await frontend.output()
        assert failure.finish == "error"
        assert told in (failure.error or "")
    engine.submit_raises = None
    await frontend.dispatcher.submit(request("r2"))
    assert (await engine.submitted.get()).request_id == "r2"


async def test_an_adapter_that_cannot_be_loaded_is_announced_and_no_request_is_to_come_again(
    frontend: FakeFrontend, engine: ScriptedEngine
) -> None:
    def failed() -> dict[str, str]:
        return {key: why for one in frontend.fleet.view.members() for key, why in one.failed_adapters.items()}

    def failed_are(announced: dict[str, str]) -> bool:
        return failed() == announced

    for number, version in enumerate(("1.1", "1.2")):
        engine.submit_raises = AdapterError("the adapter pirate cannot be loaded: DoRA", f"/pirate: DoRA ({version})")
        await frontend.dispatcher.submit(request(f"r{number}", adapter=f"pirate@{version}"))
        failure = await frontend.output()
        assert (failure.finish, failure.fault) == ("error", "request")
        assert failure.error == "the adapter pirate cannot be loaded: DoRA"
        # A former version is told of no more.
        announced = {f"pirate@{version}": f"/pirate: DoRA ({version})"}
        await until(partial(failed_are, announced))
    engine.submit_raises = None
    await frontend.dispatcher.submit(request("r2", adapter="robot@1.1"))
    await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)
    assert list(failed()) == ["pirate@1.2"]
    await frontend.dispatcher.submit(request("r3", adapter="pirate@1.2"))
    await until(partial(failed_are, {}))


async def test_an_engine_that_died_sends_requests_to_another_worker(
    frontend: FakeFrontend, engine: ScriptedEngine, work_for: StartEngine
) -> None:
    """It is not asked again at once: no attempt would be left when another worker comes."""
    engine.submit_raises = EngineError("the engine died")
    frontend.dispatcher.table.placer.deadlines = RecoveryDeadlines(ask_again_s=DEADLINE_S)
    await frontend.dispatcher.submit(request())
    other = ScriptedEngine()
    await work_for(other, "w2")
    taken = await asyncio.wait_for(other.submitted.get(), DEADLINE_S)
    assert taken.epoch > 1


async def test_a_worker_that_drains_refuses_new_work_and_ends_what_does_not_finish(
    frontend: FakeFrontend, work_for: StartEngine
) -> None:
    engine = ScriptedEngine()
    worker = await work_for(engine, "w1")
    await until(lambda: bool(frontend.fleet.view.routable()))
    await frontend.dispatcher.submit(request("r1"))
    await engine.submitted.get()
    engine.steps.put_nowait(Step(1.0, (delta("r1", 0, 10, 11),)))
    assert (await frontend.output()).token_ids == [10, 11]
    draining = asyncio.create_task(worker.service.drain(deadline_s=1.0))
    await asyncio.sleep(0)
    await frontend.dispatcher.submit(request("r2"))
    failures = [await frontend.output() for _ in range(2)]
    await draining
    reasons = {failure.request_id: failure.error or "" for failure in failures}
    assert "was lost" in reasons["r1"]
    assert reasons["r2"] == "5 workers in a row failed the request"
    assert await engine.cancelled.get() == RequestEpoch("r1", 1)


async def test_a_drain_ends_once_the_last_tokens_are_sent(frontend: FakeFrontend, work_for: StartEngine) -> None:
    engine = ScriptedEngine()
    worker = await work_for(engine, "w1")
    await until(lambda: bool(frontend.fleet.view.routable()))
    await frontend.dispatcher.submit(request())
    await engine.submitted.get()
    draining = asyncio.create_task(worker.service.drain(deadline_s=3600))
    engine.steps.put_nowait(Step(1.0, (delta("r1", 0, 10, finish="stop"),)))
    await asyncio.wait_for(draining, DEADLINE_S)
    assert (await frontend.output()).finish == "stop"


async def test_when_its_frontend_is_gone_a_worker_drops_its_requests(
    frontend: FakeFrontend, engine: ScriptedEngine, bus: Bus, subjects: Subjects
) -> None:
    await announce(bus, subjects)
    await frontend.dispatcher.submit(request())
    await engine.submitted.get()
    await announce(bus, subjects, "its successor")
    assert await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S) == RequestEpoch("r1", 1)


async def test_a_frontend_that_was_only_unheard_learns_that_its_requests_were_dropped(
    connect: Connect, bus: Bus, subjects: Subjects, work_for: StartEngine
) -> None:
    deadlines = dataclasses.replace(PATIENT, silence_s=0.01, fruitless_epochs=1)
    frontend, engine = FakeFrontend(await connect(), subjects, deadlines=deadlines), ScriptedEngine()
    await frontend.start()
    await work_for(engine, "w1")
    await until(lambda: bool(frontend.fleet.view.routable()))
    await announce(bus, subjects)
    await frontend.dispatcher.submit(request())
    await engine.submitted.get()
    await announce(bus, subjects, "its successor")
    assert (await frontend.output()).finish == "error"
    await frontend.close()


async def test_each_frontend_hears_of_its_own_requests_alone(
    connect: Connect, subjects: Subjects, frontend: FakeFrontend, engine: ScriptedEngine
) -> None:
    other = await FakeFrontend(await connect(), subjects, lease="f2").start()
    await until(lambda: bool(other.fleet.view.routable()))
    await frontend.dispatcher.submit(request("r1"))
    await other.dispatcher.submit(request("r2"))
    for _ in range(2):
        await engine.submitted.get()
    strange = delta("nobody's", 0, 30)
    engine.steps.put_nowait(Step(1.0, (delta("r1", 0, 10), delta("r2", 0, 20), strange)))
    assert await frontend.output() == delta("r1", 0, 10)
    assert await other.output() == delta("r2", 0, 20)
    await other.close()


async def test_tokens_that_are_too_large_together_are_sent_apart_and_alone_they_fail(
    frontend: FakeFrontend, engine: ScriptedEngine, bus: Bus
) -> None:
    candidates = bus.max_payload // 20
    large = Logprobs(
        Array("int64", (1, candidates), bytes(8 * candidates)),
        Array("float32", (1, candidates), struct.pack("<f", 0.5) * candidates),
        Array("int64", (1,), bytes(8)),
    )
    beyond = Array("int64", (bus.max_payload // 8, 1), bytes(bus.max_payload))
    too_large = Logprobs(beyond, beyond, Array("int64", (bus.max_payload // 8,), bytes(bus.max_payload)))
    for number in range(4):
        await frontend.dispatcher.submit(request(f"r{number}"))
        await engine.submitted.get()
    outcome = [delta(f"r{number}", 0, 10, logprobs=large) for number in range(3)]
    engine.steps.put_nowait(Step(1.0, (*outcome, delta("r3", 0, 10, logprobs=too_large))))
    answers = {(answer := await frontend.output()).request_id: answer for _ in range(4)}
    assert [answers[f"r{number}"].finish for number in range(4)] == [None, None, None, "error"]
    assert "log-probabilities" in (answers["r3"].error or "")
    assert await asyncio.wait_for(engine.cancelled.get(), DEADLINE_S) == RequestEpoch("r3", 1)


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x81\xa4type\xa5other"])
async def test_garbage_harms_nothing(
    frontend: FakeFrontend, engine: ScriptedEngine, bus: Bus, subjects: Subjects, garbage: bytes
) -> None:
    await bus.publish(subjects.work("w1"), garbage)
    await bus.flush()
    await frontend.dispatcher.submit(request())
    assert (await asyncio.wait_for(engine.submitted.get(), DEADLINE_S)).request_id == "r1"
