"""What is a request's own fault ends it at once: nobody else is asked, and nobody is blamed."""

from __future__ import annotations

import time

import pytest

from components.workers.engine_service import EngineService
from dynamo_local.core.errors import BadRequestError, RequestError
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.disaggregation.prefill_fakes import Disaggregated, FakePrefillWorker
from tests.integration.fleet_of_fakes import FakeFrontend, FakeWorker, request, until
from tests.integration.workers.worker_parts import ScriptedEngine, Worker, context_of

pytestmark = pytest.mark.integration

MANY = 12
"""Failures, more than open a breaker."""


@pytest.mark.parametrize("tokens", [(), (7, 8)])
async def test_it_fails_once_and_opens_no_breaker(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker], tokens: tuple[int, ...]
) -> None:
    for number in range(MANY):
        await frontend.dispatcher.submit(request(f"r{number}"))
        work = await pair[number % 2].submitted()
        if tokens:
            await pair[number % 2].send(work, 0, *tokens)
            assert (await frontend.output()).token_ids == list(tokens)
        await pair[number % 2].send(work, 0, finish="error", error="no such grammar", fault="request")
        failure = await frontend.output()
        assert (failure.finish, failure.error, failure.fault) == ("error", "no such grammar", "request")
        # Its worker is told that it is done with, as after every end.
        assert (await pair[number % 2].cancelled()).request_id == f"r{number}"
    assert frontend.dispatcher.table.placer.breakers.open(time.monotonic()) == ()
    assert pair[0].untouched
    assert pair[1].untouched
    assert frontend.silent


async def test_failures_of_the_worker_count_as_ever(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    for number in range(MANY):
        await frontend.dispatcher.submit(request(f"r{number}"))
        work = await pair[0].submitted()
        await pair[0].send(work, 0, finish="error", error="broken", failed=True)
        taken = await pair[1].submitted()
        await pair[1].send(taken, 0, 10, finish="stop")
        assert (await frontend.output()).token_ids == [10]
        if frontend.dispatcher.table.placer.breakers.open(time.monotonic()):
            break
    assert frontend.dispatcher.table.placer.breakers.open(time.monotonic()) == ("a",)


async def test_what_a_prefill_worker_finds_is_not_tried_by_the_decode_worker(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    _, work = await prefill.granted()
    await prefill.send(work, 0, finish="error", error="no such grammar", fault="request")
    failure = await fleet.frontend.output()
    assert (failure.error, failure.fault) == ("no such grammar", "request")
    await until(lambda: fleet.frontend.dispatcher.live_requests == 0)
    assert decode.untouched


@pytest.mark.parametrize(("error", "fault"), [(BadRequestError("too long"), "request"), (RequestError("lost"), None)])
async def test_what_the_engine_does_not_take(
    connect: Connect, subjects: Subjects, frontend: FakeFrontend, error: RequestError, fault: str | None
) -> None:
    engine = ScriptedEngine(submit_raises=error)
    worker = await Worker(context_of(await connect(), subjects, "VllmWorker", "aggregated", "w"), engine).start()
    assert isinstance(worker.service, EngineService)
    await until(lambda: len(frontend.fleet.view.routable()) == 1)
    await frontend.dispatcher.submit(request())
    failure = await frontend.output()
    assert (failure.error, failure.fault) == (str(error), fault)
    await worker.close()
