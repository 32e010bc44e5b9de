"""A prompt that is prefilled by another worker, and everything that can go wrong on the way: the client notices none
of it, and nothing is left anywhere."""

from __future__ import annotations

import dataclasses

import pytest

from components.frontend.prefill import PrefillDeadlines
from dynamo_local.core.messages.work import RequestEpoch, TokenDelta
from tests.integration.conftest import Disaggregate
from tests.integration.disaggregation.prefill_fakes import (
    ENDLESS,
    HASTY_QUEUE,
    Disaggregated,
    FakePrefillWorker,
    long_request,
)
from tests.integration.disaggregation.test_remote_prefill import NOT_SURVIVING
from tests.integration.fleet_of_fakes import PATIENT, FakeWorker

pytestmark = pytest.mark.integration

INQUISITIVE = dataclasses.replace(PATIENT, silence_s=0.05)
"""Of a frontend that soon asks after a request of which it hears nothing."""


async def answered(fleet: Disaggregated, worker: FakeWorker, position: int = 0, source: str | None = None) -> int:
    """The worker is given the request and finishes it. Returns the epoch."""
    work = await worker.submitted()
    assert (work.position, work.source) == (position, source)
    await worker.send(work, position, 90, finish="stop")
    assert (await fleet.output()).token_ids == [90]
    assert await worker.cancelled() == RequestEpoch(work.request_id, work.epoch)
    return work.epoch


# The prefill worker


async def test_a_prefill_worker_that_is_lost_before_it_claims_loses_nothing(disaggregate: Disaggregate) -> None:
    fleet = await disaggregate(queue=HASTY_QUEUE)
    decode, prefill = await fleet.decode_worker("d"), await fleet.prefill_worker("p")
    await fleet.submit()
    await prefill.job()
    await fleet.vanishes(prefill)
    other = await fleet.prefill_worker("p2")
    job, work = await other.granted()
    assert (job.delivery, work.epoch) == (2, 1)
    await other.finish(work)
    await fleet.output()
    assert await answered(fleet, decode, 1, "p2") == 2
    await job.done()
    await fleet.is_over()


async def test_a_prefill_worker_that_is_lost_at_work_is_replaced_under_a_new_job(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    job, lost = await prefill.granted()
    other = await fleet.prefill_worker("p2")
    await fleet.vanishes(prefill)
    again, work = await other.granted()
    assert again.job.job != job.job.job
    assert work.epoch == 2
    # It was only unheard. What it says is too late, and its job is nobody's any more.
    await prefill.finish(lost, 99)
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    assert await prefill.claim(job, delivery=2) is None
    await job.end("refused")
    await other.finish(work)
    assert (await fleet.output()).token_ids == [50]
    assert await answered(fleet, decode, 1, "p2") == 3
    await again.done()
    await fleet.is_over()


async def test_when_two_prefill_workers_are_lost_the_decode_worker_prefills(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    other, third = await fleet.prefill_worker("p2"), await fleet.prefill_worker("p3")
    await fleet.submit()
    jobs = []
    for worker in (prefill, other):
        job, _ = await worker.granted()
        jobs.append(job)
        await fleet.vanishes(worker)
    assert await answered(fleet, decode) == 3
    for job in jobs:
        assert await third.claim(job) is None
        await job.end("refused")
    await fleet.is_over()


@pytest.mark.parametrize("survives", [True, False])
async def test_a_prefill_worker_that_is_lost_with_the_kv_is_not_read_from(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker, survives: bool
) -> None:
    await fleet.submit(long_request() if survives else long_request(survival=NOT_SURVIVING))
    job, work = await prefill.granted()
    await prefill.finish(work)
    refused = await decode.submitted()
    assert refused.source == "p"
    await fleet.vanishes(prefill)
    await decode.refuse(refused)
    if survives:
        await fleet.output()
    # There is nobody to prefill it, and the first token, if it is out, is not asked for twice.
    assert await answered_next(fleet, decode, position=int(survives)) == 3
    await job.done()
    await fleet.is_over()


async def answered_next(fleet: Disaggregated, worker: FakeWorker, position: int) -> int:
    await worker.cancelled()
    return await answered(fleet, worker, position)


async def test_a_prefill_worker_that_refuses_is_passed_over(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    job, work = await prefill.granted()
    await prefill.refuse(work)
    await job.done()
    again, work = await prefill.granted()
    await prefill.finish(work)
    await fleet.output()
    await answered(fleet, decode, 1, "p")
    await again.done()
    await fleet.is_over()


async def test_a_prompt_that_a_prefill_worker_cannot_take_is_prefilled_by_the_decode_worker(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    """Its cache may be the smaller one."""
    await fleet.submit()
    job, work = await prefill.granted()
    await prefill.send(work, 0, finish="error", error="no room")
    await job.done()
    assert await answered(fleet, decode) == 2
    await fleet.is_over()
    assert fleet.outcomes == {"long": 1, "failed": 1}


async def test_the_late_end_of_an_earlier_epoch_is_not_that_of_the_prefill(
    fleet: Disaggregated, decode: FakeWorker
) -> None:
    await fleet.submit(long_request(survival=NOT_SURVIVING))
    lost = await decode.submitted()
    other, prefill = await fleet.decode_worker("d2"), await fleet.prefill_worker("p")
    await fleet.vanishes(decode)
    job = await prefill.job()
    await decode.send(lost, 0, 99, finish="stop")
    await prefill.is_not_told_to_stop("f1")
    work = await prefill.claim(job)
    assert work is not None
    await prefill.finish(work)
    await answered(fleet, other, 0, "p")
    await job.done()
    await fleet.is_over()


# The queue


async def test_a_job_that_is_delivered_again_takes_the_request_from_its_first_taker(
    disaggregate: Disaggregate,
) -> None:
    fleet = await disaggregate(queue=HASTY_QUEUE)
    decode, prefill = await fleet.decode_worker("d"), await fleet.prefill_worker("p")
    other = await fleet.prefill_worker("p2")
    await fleet.submit()
    _, lost = await prefill.granted()
    job, work = await other.granted()
    assert (job.delivery, work.epoch) == (2, 2)
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await prefill.finish(lost, 99)
    await other.finish(work)
    assert await fleet.output() == TokenDelta("r1", 2, 0, [50])
    assert await answered(fleet, decode, 1, "p2") == 3
    await job.done()
    await fleet.is_over()


async def test_a_job_that_is_delivered_too_often_is_ended(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    job, _ = await prefill.granted()
    assert await prefill.claim(job, ENDLESS.deliveries) is not None
    assert await prefill.claim(job, ENDLESS.deliveries + 1) is None
    await job.end("refused")
    for epoch in (1, 2):
        assert await prefill.cancelled() == RequestEpoch("r1", epoch)
    assert await answered(fleet, decode) == 3
    await fleet.is_over()
    assert fleet.outcomes == {"long": 1, "delivered too often": 1}


async def test_a_job_that_nobody_claims_in_time_is_withdrawn(disaggregate: Disaggregate) -> None:
    fleet = await disaggregate(deadlines=PrefillDeadlines(in_queue_s=0.0))
    decode, prefill = await fleet.decode_worker("d"), await fleet.prefill_worker("p")
    await fleet.submit()
    work = await decode.submitted()
    assert (work.epoch, work.source) == (1, None)
    job = await prefill.job()
    assert await prefill.claim(job) is None
    await job.end("refused")
    await decode.send(work, 0, 90, finish="stop")
    assert (await fleet.output()).token_ids == [90]
    await fleet.is_over()
    assert fleet.outcomes == {"long": 1, "not claimed in time": 1, "not wanted any more": 1}


async def test_a_prefill_that_takes_for_ever_is_taken_back(disaggregate: Disaggregate) -> None:
    fleet = await disaggregate(deadlines=PrefillDeadlines(in_queue_s=3600.0, at_work_s=0.0))
    decode, prefill = await fleet.decode_worker("d"), await fleet.prefill_worker("p")
    await fleet.submit()
    job, _ = await prefill.granted()
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    assert await answered(fleet, decode) == 2
    await job.done()
    await fleet.is_over()
    assert fleet.outcomes == {"long": 1, "not computed in time": 1}


async def test_a_grant_that_is_lost_on_the_way_is_noticed(disaggregate: Disaggregate) -> None:
    """The prefill worker does not know the request it is asked after."""
    fleet = await disaggregate(frontend=INQUISITIVE)
    decode, prefill = await fleet.decode_worker("d"), await fleet.prefill_worker("p")
    await fleet.submit()
    job, lost = await prefill.granted()
    await prefill.asked_again()
    await prefill.refuse(lost)
    again, work = await prefill.granted()
    assert again.job.job != job.job.job
    assert await prefill.claim(job, 2) is None
    await job.end("refused")
    await prefill.finish(work)
    await fleet.output()
    await answered(fleet, decode, 1, "p")
    await again.done()
    await fleet.is_over()


# The decode worker


async def test_a_decode_worker_that_is_gone_at_the_hand_over_is_replaced(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    job, work = await prefill.granted()
    await fleet.vanishes(decode)
    await prefill.finish(work)
    assert (await fleet.output()).token_ids == [50]
    other = await fleet.decode_worker("d2")
    assert await answered(fleet, other, 1, "p") == 2
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await job.done()
    await fleet.is_over()


@pytest.mark.parametrize("survives", [True, False])
async def test_a_decode_worker_that_refuses_is_replaced_by_one_that_reads_from_the_same_source(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker, survives: bool
) -> None:
    await fleet.submit(long_request() if survives else long_request(survival=NOT_SURVIVING))
    other = await fleet.decode_worker("d2")
    job, work = await prefill.granted()
    await prefill.finish(work)
    await decode.refuse(await decode.submitted())
    if survives:
        await fleet.output()
    await prefill.is_not_told_to_stop("f1")
    assert await answered(fleet, other, int(survives), "p") == 3
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await job.done()
    await fleet.is_over()


async def test_a_decode_worker_that_is_lost_while_it_reads_is_replaced_too(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    other = await fleet.decode_worker("d2")
    job, work = await prefill.granted()
    await prefill.finish(work)
    await decode.submitted()
    await fleet.vanishes(decode)
    await fleet.output()
    assert await answered(fleet, other, 1, "p") == 3
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await job.done()
    await fleet.is_over()
