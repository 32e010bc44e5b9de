"""A long prompt is prefilled by another worker: when, and what the client and the two workers see of it."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from dynamo_local.bus.jetstream.prefill_queue import LIMITS, delete_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.work import RequestEpoch, TokenDelta
from dynamo_local.core.request.recovery import Fidelity, Survival
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Disaggregate
from tests.integration.disaggregation.prefill_fakes import (
    LONG,
    WORTH_IT,
    Disaggregated,
    FakePrefillWorker,
    long_request,
)
from tests.integration.fleet_of_fakes import FakeWorker, until

pytestmark = pytest.mark.integration

NOT_SURVIVING = Survival(Fidelity.NONE, "seed")


async def prefilled_by(decode: FakeWorker, fleet: Disaggregated, reason: str | None) -> None:
    """The request goes to its decode worker as if there were no others."""
    work = await decode.submitted()
    assert (work.epoch, work.position, work.source, work.hold_s) == (1, 0, None, 0.0)
    assert fleet.outcomes == ({} if reason is None else {reason: 1})
    await decode.send(work, 0, 10, finish="stop")
    assert (await fleet.output()).token_ids == [10]
    await fleet.is_over()


# When


async def test_a_long_prompt_goes_to_a_prefill_worker_and_then_with_its_kv_to_the_decode_worker(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    job, work = await prefill.granted()
    assert (job.job.request_id, job.job.frontend, job.job.tokens) == ("r1", "f1", len(LONG))
    assert (work.epoch, work.position, work.token_ids, work.source) == (1, 0, list(LONG), None)
    assert msgspec.msgpack.decode(work.sampling)["max_tokens"] == 1
    assert work.hold_s > 0
    assert decode.untouched
    assert fleet.frontend.local.ledger.outstanding("d") == len(LONG)
    await prefill.finish(work)
    # The first token, before the decode worker has produced anything. Nor is it the end.
    assert await fleet.output() == TokenDelta("r1", 1, 0, [50])
    taken = await decode.submitted()
    assert (taken.epoch, taken.position, taken.token_ids) == (2, 1, [*LONG, 50])
    assert (taken.source, taken.hold_s) == ("p", 0.0)
    assert msgspec.msgpack.decode(taken.sampling)["max_tokens"] == 8
    await prefill.is_not_told_to_stop("f1")
    await decode.send(taken, 1, 51, cached_tokens=16)
    assert await fleet.output() == TokenDelta("r1", 2, 1, [51])
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await job.done()
    await decode.send(taken, 2, 52, finish="stop")
    assert (await fleet.output()).finish == "stop"
    assert await decode.cancelled() == RequestEpoch("r1", 2)
    await fleet.is_over()
    assert prefill.untouched
    assert fleet.outcomes == {"long": 1, "prefilled elsewhere": 1}


async def test_a_prompt_that_is_not_longer_than_the_limit_stays(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit(long_request(prompt=LONG[: WORTH_IT.max_local_prefill_length]))
    await prefilled_by(decode, fleet, "short")


async def test_a_prompt_that_is_mostly_cached_stays(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    decode.cached = len(LONG) - WORTH_IT.max_local_prefill_length
    await fleet.submit()
    await prefilled_by(decode, fleet, "cached")


async def test_a_prompt_that_is_cached_a_little_less_goes(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    decode.cached = len(LONG) - WORTH_IT.max_local_prefill_length - 1
    await fleet.submit()
    assert (await prefill.job()).job.request_id == "r1"


async def test_without_a_word_of_the_cache_it_stays(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await decode.keep_quiet_about_the_cache()
    await fleet.submit()
    await prefilled_by(decode, fleet, "unknown_cache")


async def test_without_a_prefill_worker_it_stays(fleet: Disaggregated, decode: FakeWorker) -> None:
    await fleet.submit()
    await prefilled_by(decode, fleet, "no_worker")


async def test_with_a_prefill_worker_that_drains_it_stays(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await prefill.announce("draining")
    await until(lambda: not fleet.frontend.fleet.view.routable(("prefill",)))
    await fleet.submit()
    await prefilled_by(decode, fleet, "no_worker")


async def test_without_a_queue_it_stays(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker, bus: Bus, subjects: Subjects
) -> None:
    await delete_prefill_queue(bus, subjects)
    await fleet.submit()
    work = await decode.submitted()
    assert work.source is None
    assert fleet.outcomes == {"unknown_queue": 1}


async def test_what_must_not_be_prefilled_elsewhere_stays(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit(long_request(prefill_elsewhere=False))
    await prefilled_by(decode, fleet, None)


async def test_of_many_that_come_at_once_no_more_are_queued_than_may_wait(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    for number in range(5):
        await fleet.submit(long_request(f"r{number}", prompt=(number, *LONG)))
    stayed = {(await decode.submitted()).request_id for _ in range(2)}
    await fleet.queued(WORTH_IT.max_prefill_queue_size)
    queued = {(await prefill.granted())[1].request_id for _ in range(3)}
    assert stayed | queued == {f"r{number}" for number in range(5)}
    assert fleet.outcomes == {"long": 3, "queue_full": 2}


async def test_a_queue_that_takes_no_more_costs_nothing_but_the_attempt(disaggregate: Disaggregate) -> None:
    fleet = await disaggregate(queue=dataclasses.replace(LIMITS, messages=1))
    decode = await fleet.decode_worker("d")
    prefill = await fleet.prefill_worker("p")
    await fleet.submit(long_request("r1"))
    await fleet.queued(1)
    await fleet.submit(long_request("r2", prompt=LONG[1:]))
    work = await decode.submitted()
    assert (work.request_id, work.epoch, work.source) == ("r2", 1, None)
    assert fleet.outcomes["not queued"] == 1
    _, first = await prefill.granted()
    assert first.request_id == "r1"


# What the client gets


async def test_what_would_not_survive_a_hand_over_is_sampled_by_the_decode_worker_from_the_start(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit(long_request(survival=NOT_SURVIVING))
    job, work = await prefill.granted()
    await prefill.finish(work)
    taken = await decode.submitted()
    assert (taken.epoch, taken.position, taken.token_ids, taken.source) == (2, 0, list(LONG), "p")
    assert fleet.frontend.silent
    await prefill.is_not_told_to_stop("f1")
    await decode.send(taken, 0, 60, cached_tokens=16)
    # It is the decode worker that tells of the request's beginning.
    assert await fleet.output() == TokenDelta("r1", 2, 0, [60], cached_tokens=16)
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await job.done()
    await decode.send(taken, 1, 61, finish="length")
    assert (await fleet.output()).finish == "length"
    await fleet.is_over()


async def test_an_answer_that_stops_with_its_first_token_never_reaches_the_decode_worker(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit()
    job, work = await prefill.granted()
    await prefill.send(work, 0, 50, finish="stop", stop_reason=50)
    assert await fleet.output() == TokenDelta("r1", 1, 0, [50], finish="stop", stop_reason=50)
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await job.done()
    await fleet.is_over()
    assert decode.untouched


async def test_a_client_that_wants_one_token_gets_its_end_with_it(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    await fleet.submit(long_request(max_tokens=1))
    job, work = await prefill.granted()
    await prefill.finish(work)
    assert await fleet.output() == TokenDelta("r1", 1, 0, [50], finish="length")
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    await job.done()
    await fleet.is_over()
    assert decode.untouched


async def test_what_the_prefill_worker_says_twice_does_not_cost_the_kv(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    """It does when it was asked for a sign of life in the very moment at which it had finished."""
    await fleet.submit()
    _, work = await prefill.granted()
    await prefill.finish(work)
    await prefill.finish(work)
    taken = await decode.submitted()
    await prefill.finish(work)
    await prefill.is_not_told_to_stop("f1")
    await decode.send(taken, 1, 51)
    assert [(await fleet.output()).token_ids for _ in range(2)] == [[50], [51]]
    assert await prefill.cancelled() == RequestEpoch("r1", 1)
    assert fleet.frontend.silent


async def test_keys_take_turns_at_jobs_and_at_room_in_the_queue(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    def prompt(number: int) -> tuple[int, ...]:
        return (*LONG, number)

    for number in range(4):
        await fleet.submit(long_request(f"flood{number}", prompt=prompt(number), key="flood"))
        await until(lambda number=number: fleet.outcomes.total() == number + 1)  # type: ignore[misc]
    await fleet.queued(3)
    assert fleet.outcomes == {"long": 3, "queue_full": 1}
    assert (await decode.submitted()).request_id == "flood3"
    await fleet.submit(long_request("late", prompt=prompt(9), key="late"))
    await fleet.queued(4)
    taken = [await prefill.granted() for _ in range(4)]
    assert [work.request_id for _, work in taken] == ["flood0", "late", "flood1", "flood2"]
    assert [tuple(work.token_ids) for _, work in taken] == [prompt(number) for number in (0, 9, 1, 2)]
    # A job that comes again is the same prompt's, though it was published for another one's.
    again = await prefill.claim(taken[1][0], delivery=2)
    assert again is not None
    assert (again.request_id, again.epoch) == ("late", 2)
    await prefill.finish(again)
    await fleet.output()
    assert (await decode.submitted()).request_id == "late"
    assert await prefill.claim(taken[1][0], delivery=3) is None, "it has been computed"


async def test_a_prompt_that_ends_keeps_nobody_from_its_turn(
    fleet: Disaggregated, decode: FakeWorker, prefill: FakePrefillWorker
) -> None:
    for number, key in enumerate(("flood", "flood", "late")):
        await fleet.submit(long_request(f"r{number}", prompt=(*LONG, number), key=key))
        await fleet.queued(number + 1)
    assert (await prefill.granted())[1].request_id == "r0"
    assert (await prefill.granted())[1].request_id == "r2"
    last = await prefill.job()
    await fleet.frontend.dispatcher.cancel(["r1"])
    assert await prefill.claim(last) is None
    assert fleet.outcomes["not wanted any more"] == 1
