"""A client that leaves while its prompt is prefilled elsewhere: every engine, hold and job is free again."""

from __future__ import annotations

import pytest

from dynamo_local.core.messages.work import RequestEpoch
from tests.integration.disaggregation.prefill_fakes import Disaggregated, FakePrefillWorker
from tests.integration.fleet_of_fakes import FakeWorker

pytestmark = pytest.mark.integration


async def test_a_request_cancelled_in_the_queue_is_refused_to_who_claims_it(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    job = await prefill.job()
    await fleet.frontend.dispatcher.cancel(["r1"])
    assert await prefill.claim(job) is None
    await job.end("refused")
    await fleet.is_over()
    assert decode.untouched
    assert prefill.untouched


async def test_a_request_cancelled_at_the_prefill_worker_is_cancelled_there(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    job, work = await prefill.granted()
    await fleet.frontend.dispatcher.cancel(["r1"])
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await prefill.finish(work)
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await job.done()
    await fleet.is_over()
    assert fleet.frontend.silent
    assert decode.untouched


async def test_a_request_cancelled_while_it_is_handed_over_is_cancelled_at_both(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    job, work = await prefill.granted()
    await prefill.finish(work)
    await decode.submitted()
    await fleet.frontend.dispatcher.cancel(["r1"])
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    assert await decode.cancelled() == RequestEpoch("r1", 2)
    await job.done()
    await fleet.is_over()


async def test_a_request_cancelled_before_its_decode_worker_is_there_leaves_no_kv_behind(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    job, work = await prefill.granted()
    await fleet.vanishes(decode)
    await prefill.finish(work)
    await fleet.output()
    await fleet.frontend.dispatcher.cancel(["r1"])
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await job.done()
    await fleet.is_over()
