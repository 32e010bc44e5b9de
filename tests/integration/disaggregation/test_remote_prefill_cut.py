"""A cut between a frontend and its workers while prompts are prefilled elsewhere: it costs time only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, create_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.work import QueueLength, TokenDelta
from dynamo_local.core.subjects import Subjects
from tests.integration.disaggregation.prefill_fakes import Disaggregated, remote_prefill
from tests.integration.disaggregation.test_remote_prefill_failures import INQUISITIVE, answered
from tests.integration.fleet_of_fakes import FakeFrontend, FakeWorker, until
from tests.integration.nats_process import NatsProcess

pytestmark = pytest.mark.integration


@pytest.fixture
async def cut_off(own_nats: NatsProcess, subjects: Subjects) -> AsyncIterator[Disaggregated]:
    """A frontend that asks after its requests, and workers, which a test may cut off from one another."""
    buses = [await Bus.connect(own_nats.address, name=name) for name in ("frontend", "workers")]
    await create_prefill_queue(buses[1], subjects)
    frontend = FakeFrontend(buses[0], subjects, deadlines=INQUISITIVE, remote_of=remote_prefill())
    fleet = Disaggregated(await frontend.start(), PrefillQueue(buses[1], subjects), buses[1])
    yield fleet
    await fleet.close()
    for bus in buses:
        await bus.close()


async def test_a_cut_during_the_prefill_costs_time_only(own_nats: NatsProcess, cut_off: Disaggregated) -> None:
    fleet = cut_off
    decode, prefill = await fleet.decode_worker("d"), await fleet.prefill_worker("p")
    await fleet.submit()
    job, work = await prefill.granted()
    await is_down_and_up_again(own_nats, fleet)
    # The token was lost. It is asked for again.
    await prefill.asked_again()
    await prefill.finish(work)
    assert (await fleet.output()).token_ids == [50]
    await answered(fleet, decode, 1, "p")
    await job.done()
    assert await fleet.queue.length() == QueueLength(0, 0)


async def test_what_comes_during_a_cut_is_prefilled_by_the_decode_worker(
    own_nats: NatsProcess, cut_off: Disaggregated
) -> None:
    fleet = cut_off
    decode = await fleet.decode_worker("d")
    await fleet.prefill_worker("p")
    own_nats.kill()
    await until(lambda: not fleet.frontend.bus.connected)
    await fleet.submit()
    await until(lambda: fleet.outcomes["unknown_queue"] == 1)
    own_nats.start()
    # What was sent when the worker had not come back yet is lost. The worker says so whenever it is asked.
    answering = asyncio.create_task(knows_nothing(decode))
    try:
        work = await decode.submitted()
    finally:
        answering.cancel()
    assert (work.position, work.source) == (0, None)


async def knows_nothing(worker: FakeWorker) -> None:
    while True:
        asked = await worker.asked_again()
        unknown = TokenDelta(asked.request_id, asked.epoch, 0, [], finish="error", error="unknown", refused=True)
        await worker.send_all("f1", unknown)


async def is_down_and_up_again(nats: NatsProcess, fleet: Disaggregated) -> None:
    nats.kill()
    buses = (fleet.frontend.bus, fleet.bus)
    await until(lambda: not any(bus.connected for bus in buses))
    nats.start()
    await until(lambda: all(bus.connected for bus in buses))
