"""Requests with the same prompt, such as the choices of one with n > 1: it is prefilled once, for all of them."""

from __future__ import annotations

import dataclasses

import pytest

from components.frontend.prefill import PrefillDeadlines
from dynamo_local.bus.jetstream.prefill_queue import LIMITS
from dynamo_local.core.messages.work import QueueLength, RequestEpoch, Submit, TokenDelta
from tests.integration.conftest import Disaggregate
from tests.integration.disaggregation.prefill_fakes import LONG, Disaggregated, FakePrefillWorker, long_request
from tests.integration.disaggregation.test_remote_prefill import NOT_SURVIVING
from tests.integration.fleet_of_fakes import FakeWorker, until

pytestmark = pytest.mark.integration


async def submit_three(fleet: Disaggregated, shared: int = 2, **more: object) -> None:
    """Requests 0 to 2 with the same prompt."""
    for number in range(3):
        await fleet.submit(long_request(f"{number}_r", **more))
    await until(lambda: fleet.outcomes["shared"] == shared)


async def three_submissions(worker: FakeWorker) -> dict[str, Submit]:
    works = [await worker.submitted() for _ in range(3)]
    return {work.request_id: work for work in works}


async def end_all(fleet: Disaggregated, decode: FakeWorker, works: dict[str, Submit]) -> None:
    for work in works.values():
        await decode.send(work, work.position, 90, finish="stop")
        assert (await fleet.output()).token_ids == [90]


async def test_they_share_one_prefill_and_only_one_of_them_its_token(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await submit_three(fleet)
    job, work = await prefill.granted()
    assert await fleet.queue.length() == QueueLength(waiting=0, in_hand=1)
    owner = work.request_id
    await prefill.finish(work)
    assert await fleet.output() == TokenDelta(owner, 1, 0, [50])
    works = await three_submissions(decode)
    told = {name: (taken.epoch, taken.position, taken.source) for name, taken in works.items()}
    assert told == {name: (2, 1, "p") if name == owner else (1, 0, "p") for name in ("0_r", "1_r", "2_r")}
    # The last that takes over frees the KV, whatever it is told twice meanwhile.
    for name in sorted(works)[:2]:
        await decode.send(works[name], works[name].position, 60)
        assert (await fleet.output()).token_ids == [60]
        await prefill.finish(work)
        await prefill.is_not_told_to_stop("f1")
    last = works[sorted(works)[2]]
    await decode.send(last, last.position, 60)
    await fleet.output()
    assert await prefill.cancelled() == RequestEpoch(owner, 1)
    await job.done()
    for taken in works.values():
        await decode.send(taken, taken.position + 1, 61, finish="stop")
        await fleet.output()
    await fleet.is_over()
    assert fleet.outcomes == {"long": 3, "shared": 2, "prefilled elsewhere": 1}


async def test_other_prompts_and_other_salts_are_others(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit(long_request("r1"))
    await fleet.submit(long_request("r2", cache_salt="salt"))
    await fleet.submit(long_request("r3", prompt=(*LONG, 0)))
    assert {(await prefill.granted())[1].request_id for _ in range(3)} == {"r1", "r2", "r3"}


async def test_the_same_prompt_with_another_adapter_is_another(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit(long_request("r1"))
    await fleet.submit(long_request("r2", adapter="pirate"))
    works = [(await prefill.granted())[1] for _ in range(2)]
    assert {work.request_id: work.adapter for work in works} == {"r1": None, "r2": "pirate"}


async def test_a_full_queue_keeps_nobody_from_sharing(disaggregate: Disaggregate) -> None:
    fleet = await disaggregate(queue=dataclasses.replace(LIMITS, messages=1))
    await fleet.decode_worker("d")
    await fleet.prefill_worker("p")
    await submit_three(fleet)
    await fleet.queued(1)
    await fleet.submit(long_request("3_r"))
    await until(lambda: fleet.outcomes["shared"] == 3)


async def test_what_does_not_survive_a_hand_over_shares_as_well(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await submit_three(fleet, survival=NOT_SURVIVING)
    job, work = await prefill.granted()
    await prefill.finish(work)
    works = await three_submissions(decode)
    assert {(taken.position, taken.source) for taken in works.values()} == {(0, "p")}
    await end_all(fleet, decode, works)
    assert await prefill.cancelled() == RequestEpoch(work.request_id, 1)
    await job.done()
    await fleet.is_over()


@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_an_owner_that_ends_with_its_first_token_leaves_the_kv_to_the_others(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker, finish: str
) -> None:
    await submit_three(fleet, max_tokens=1)
    job, work = await prefill.granted()
    await prefill.send(work, 0, 50, finish=finish)
    assert (await fleet.output()).finish == finish
    works = {taken.request_id: taken for taken in [await decode.submitted(), await decode.submitted()]}
    assert works.keys() == {"0_r", "1_r", "2_r"} - {work.request_id}
    assert {(taken.position, taken.source) for taken in works.values()} == {(0, "p")}
    await prefill.is_not_told_to_stop("f1")
    await end_all(fleet, decode, works)
    assert await prefill.cancelled() == RequestEpoch(work.request_id, 1)
    await job.done()
    await fleet.is_over()


async def test_an_owner_that_is_cancelled_leaves_the_others_a_job_of_their_own(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await submit_three(fleet)
    job, work = await prefill.granted()
    await fleet.frontend.dispatcher.cancel([work.request_id])
    assert await prefill.cancelled() == RequestEpoch(work.request_id, 1)
    await job.done()
    again, second = await prefill.granted()
    assert second.request_id != work.request_id
    await until(lambda: fleet.outcomes["shared"] == 3)
    await prefill.finish(second)
    await fleet.output()
    works = {taken.request_id: taken for taken in [await decode.submitted(), await decode.submitted()]}
    assert {taken.source for taken in works.values()} == {"p"}
    await end_all(fleet, decode, works)
    assert await prefill.cancelled() == RequestEpoch(second.request_id, 1)
    await again.done()
    await fleet.is_over()


@pytest.mark.parametrize("claimed", [True, False])
async def test_when_all_are_cancelled_at_once_no_other_job_is_published(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker, claimed: bool
) -> None:
    await submit_three(fleet)
    job = await prefill.job()
    if claimed:
        assert await prefill.claim(job) is not None
    await fleet.frontend.dispatcher.cancel(["0_r", "1_r", "2_r"])
    assert await prefill.claim(job, 2) is None
    await job.end("refused")
    await fleet.is_over()
    assert fleet.outcomes == {"long": 3, "shared": 2, "not wanted any more": 1}
    assert decode.untouched


async def test_one_that_shares_may_be_cancelled_without_harm_to_the_others(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await submit_three(fleet)
    job, work = await prefill.granted()
    waiting, reading = sorted({"0_r", "1_r", "2_r"} - {work.request_id})
    await fleet.frontend.dispatcher.cancel([waiting])
    await prefill.finish(work)
    await fleet.output()
    works = {taken.request_id: taken for taken in [await decode.submitted(), await decode.submitted()]}
    assert works.keys() == {work.request_id, reading}
    await fleet.frontend.dispatcher.cancel([reading])
    assert await decode.cancelled() == RequestEpoch(reading, 1)
    await prefill.is_not_told_to_stop("f1")
    await end_all(fleet, decode, {work.request_id: works[work.request_id]})
    assert await prefill.cancelled() == RequestEpoch(work.request_id, 1)
    await job.done()
    await fleet.is_over()


async def test_a_prefill_worker_that_is_lost_is_lost_for_all_and_only_once_more(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    """A prompt that ends prefill workers does not end one for each request that has it."""
    others = [await fleet.prefill_worker("p2"), await fleet.prefill_worker("p3")]
    await submit_three(fleet)
    job, _ = await prefill.granted()
    await fleet.vanishes(prefill)
    again, _ = await others[0].granted()
    await until(lambda: fleet.outcomes["shared"] == 4)
    await fleet.vanishes(others[0])
    works = await three_submissions(decode)
    assert {taken.source for taken in works.values()} == {None}
    await end_all(fleet, decode, works)
    await job.end("lost")
    await again.end("lost")
    await fleet.is_over()


async def test_a_job_that_nobody_claims_in_time_is_withdrawn_from_all(disaggregate: Disaggregate) -> None:
    fleet = await disaggregate(deadlines=PrefillDeadlines(in_queue_s=1.5))
    decode, prefill = await fleet.decode_worker("d"), await fleet.prefill_worker("p")
    for number in range(3):
        await fleet.submit(long_request(f"{number}_r"))
    works = await three_submissions(decode)
    assert {(taken.position, taken.source) for taken in works.values()} == {(0, None)}
    await end_all(fleet, decode, works)
    job = await prefill.job()
    assert await prefill.claim(job) is None
    await job.end("refused")
    await fleet.is_over()


async def test_a_job_that_cannot_be_queued_is_nobodys(disaggregate: Disaggregate) -> None:
    fleet = await disaggregate(queue=dataclasses.replace(LIMITS, messages=1))
    decode, prefill = await fleet.decode_worker("d"), await fleet.prefill_worker("p")
    await fleet.submit(long_request("first", prompt=LONG[1:]))
    await fleet.queued(1)
    for number in range(3):
        await fleet.submit(long_request(f"{number}_r"))
    works = await three_submissions(decode)
    assert {(taken.position, taken.source) for taken in works.values()} == {(0, None)}
    await end_all(fleet, decode, works)
    job, _ = await prefill.granted()
    assert job.job.request_id == "first"
