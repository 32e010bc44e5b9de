"""A frontend's requests and its workers: each token once and in order, and one failure for one request."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.presence import LeaseLost
from dynamo_local.core.messages.work import Progress, RequestEpoch, TokenDelta
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import StartWorker
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, FakeWorker, request, until

pytestmark = pytest.mark.integration


async def test_a_submission_says_all_that_the_worker_must_know(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    told: dict[str, Any] = {"session_id": "s", "trace_headers": {"traceparent": "t"}}
    told |= {"reasoning_parser_kwargs": msgspec.msgpack.encode({"chat_template_kwargs": {"thinking": True}})}
    carried = {"priority": 5, "cache_salt": "salt", "adapter": "pirate", "reasoning_ended": True, **told}
    await frontend.dispatcher.submit(request(**carried))
    work = await pair[0].submitted()
    assert (work.request_id, work.epoch, work.frontend, work.position) == ("r1", 1, "f1", 0)
    assert (work.token_ids, work.arrival_time) == ([1, 2, 3], 1.0)
    assert {name: getattr(work, name) for name in carried} == carried


async def test_tokens_come_out_once_and_in_order(frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]) -> None:
    await frontend.dispatcher.submit(request())
    work = await pair[0].submitted()
    await pair[0].send(work, 0, 10, 11)
    await pair[0].send(work, 0, 10, 11)
    await pair[0].send(work, 1, 11, 12, finish="stop")
    await pair[0].send(work, 3, 13)
    assert await frontend.output() == TokenDelta("r1", 1, 0, [10, 11])
    assert await frontend.output() == TokenDelta("r1", 1, 2, [12], finish="stop")
    await until(lambda: frontend.dispatcher.live_requests == 0)
    assert frontend.silent
    assert frontend.local.ledger.outstanding("a") == 0


async def test_requests_spread_and_do_not_mix(frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]) -> None:
    for number in range(6):
        await frontend.dispatcher.submit(request(f"r{number}"))
    for worker in pair:
        works = [await worker.submitted() for _ in range(3)]
        await worker.send_all("f1", *(TokenDelta(w.request_id, 1, 0, [7], finish="stop") for w in works))
        outputs = await frontend.dispatcher.outputs()
        assert [delta.request_id for delta in outputs.deltas] == [work.request_id for work in works]
    await until(lambda: frontend.dispatcher.live_requests == 0)


async def test_a_finish_told_twice_in_one_batch_is_one_finish(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    await frontend.dispatcher.submit(request())
    await pair[0].submitted()
    end = TokenDelta("r1", 1, 0, [], finish="abort")
    await pair[0].send_all("f1", end, end)
    assert (await frontend.output()).finish == "abort"


async def test_a_worker_that_refuses_is_passed_over(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    await frontend.dispatcher.submit(request())
    refused = await pair[0].submitted()
    await pair[0].refuse(refused)
    await pair[0].refuse(refused)  # twice: it must not be placed twice
    taken = await pair[1].submitted()
    assert taken.epoch == 2
    await pair[0].send(refused, 0, 99)
    await pair[1].send(taken, 0, 10, finish="stop")
    assert await frontend.output() == TokenDelta("r1", 2, 0, [10], finish="stop")
    assert frontend.silent
    assert pair[1].untouched


async def test_the_only_worker_is_asked_again_but_not_for_ever(
    frontend: FakeFrontend, start_worker: StartWorker
) -> None:
    worker = await start_worker("a")
    await frontend.knows(worker)
    await frontend.dispatcher.submit(request())
    for epoch in range(1, 6):
        work = await worker.submitted()
        assert work.epoch == epoch
        await worker.refuse(work)
    failure = await frontend.output()
    assert failure.finish == "error"
    assert failure.error == "5 workers in a row failed the request"
    assert frontend.local.ledger.outstanding("a") == 0


async def test_a_request_whose_worker_is_lost_before_its_first_token_goes_to_another(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    await frontend.dispatcher.submit(request())
    lost = await pair[0].submitted()
    frontend.pass_silence(1.5)
    await pair[1].announce("draining")
    await pair[1].announce("ready")
    await until(lambda: len(frontend.changes) == 4)
    frontend.pass_silence(1.0)
    taken = await pair[1].submitted()
    assert taken.epoch == 2
    # It was only unheard: what it still sends is fenced off, and it is told to stop.
    await pair[0].send(lost, 0, 99)
    assert await pair[0].cancelled() == RequestEpoch("r1", 1)
    await pair[1].send(taken, 0, 10, finish="stop")
    assert await frontend.output() == TokenDelta("r1", 2, 0, [10], finish="stop")
    assert frontend.silent


async def test_a_worker_that_refuses_and_leaves_is_one_loss(frontend: FakeFrontend, start_worker: StartWorker) -> None:
    """Both are told, while the request waits for another worker: it must be placed once."""
    worker = await start_worker("a")
    await frontend.knows(worker)
    await frontend.dispatcher.submit(request())
    work = await worker.submitted()
    await worker.announce("draining")
    await frontend.knows()
    await worker.refuse(work)
    assert await worker.cancelled() == RequestEpoch("r1", 1)
    frontend.pass_silence()
    other = await start_worker("b")
    taken = await other.submitted()
    assert taken.epoch == 2
    await other.send(taken, 0, 10, finish="stop")
    assert (await frontend.output()).token_ids == [10]
    assert other.untouched


async def test_a_restarted_worker_is_a_new_one(
    frontend: FakeFrontend, bus: Bus, subjects: Subjects, start_worker: StartWorker
) -> None:
    old = await FakeWorker(bus, subjects, "old", watcher="w").start()
    await frontend.knows(old)
    await frontend.dispatcher.submit(request())
    work = await old.submitted()
    new = await FakeWorker(bus, subjects, "new", watcher="w").start()
    taken = await new.submitted()
    await old.send(work, 0, 99)
    await new.send(taken, 0, 10)
    assert await frontend.output() == TokenDelta("r1", 2, 0, [10])


async def test_a_worker_lost_after_tokens_costs_its_own_requests_one_error_each(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    await frontend.dispatcher.submit(request("r1"))
    await frontend.dispatcher.submit(request("r2"))
    lost, kept = await pair[0].submitted(), await pair[1].submitted()
    for worker, work in zip(pair, (lost, kept), strict=True):
        await worker.send(work, 0, 10)
        await frontend.output()
    frontend.pass_silence(1.5)
    await pair[1].announce("starting")
    await pair[1].announce("ready")
    await until(lambda: len(frontend.changes) == 4)
    frontend.pass_silence(1.0)
    failure = await frontend.output()
    assert (failure.request_id, failure.finish, failure.position) == (lost.request_id, "error", 1)
    assert "lost" in (failure.error or "")
    await pair[0].send(lost, 1, 11)
    await pair[1].send(kept, 1, 11, finish="stop")
    assert await frontend.output() == TokenDelta(kept.request_id, 1, 1, [11], finish="stop")
    assert frontend.silent


async def test_a_revoked_worker_finishes_its_work_or_is_missed(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    await frontend.dispatcher.submit(request("r1"))
    work = await pair[0].submitted()
    await frontend.revoke(pair[0])
    await frontend.knows(pair[1])
    await pair[0].send(work, 0, 10)
    assert (await frontend.output()).token_ids == [10]
    frontend.pass_silence()
    assert (await frontend.output()).finish == "error"


async def test_lost_tokens_are_asked_for_again(frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]) -> None:
    await frontend.dispatcher.submit(request())
    work = await pair[0].submitted()
    await pair[0].send(work, 0, 10)
    await pair[0].send(work, 2, 12)
    assert await pair[0].asked_again() == Progress("r1", 1, 1)
    await pair[0].send(work, 1, 11, 12, finish="stop")
    assert await frontend.output() == TokenDelta("r1", 1, 0, [10])
    assert await frontend.output() == TokenDelta("r1", 1, 1, [11, 12], finish="stop")


async def test_a_worker_that_gives_a_request_up_need_not_know_its_position(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    await frontend.dispatcher.submit(request())
    work = await pair[0].submitted()
    await pair[0].send(work, 0, 10, 11)
    await pair[0].send(work, 0, finish="error", error="shut down")
    assert (await frontend.output()).token_ids == [10, 11]
    failure = await frontend.output()
    assert (failure.position, failure.token_ids, failure.error) == (2, [], "shut down")


@pytest.mark.parametrize("error", [BusError("no bus"), ValueError("not a number"), OverflowError("too large")])
async def test_a_request_that_cannot_be_sent_fails_alone(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker], error: Exception
) -> None:
    def sampling(position: int, at_most: int | None = None) -> bytes:
        raise error

    await frontend.dispatcher.submit(request("bad", sampling=sampling))
    assert ((failure := await frontend.output()).request_id, failure.finish) == ("bad", "error")
    await frontend.dispatcher.submit(request("beyond", priority=2**70))
    assert ((failure := await frontend.output()).request_id, failure.finish) == ("beyond", "error")
    await frontend.dispatcher.submit(request("large", prompt=(2**40,) * 1_000_000))
    assert ((failure := await frontend.output()).request_id, failure.finish) == ("large", "error")
    await frontend.dispatcher.submit(request("good"))
    await until(lambda: sum(frontend.local.ledger.outstanding(worker.lease) for worker in pair) == 3)
    assert frontend.silent


async def test_workers_are_told_of_a_worker_that_is_gone(
    bus: Bus, subjects: Subjects, frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()

    async def on_lost(told: LeaseLost) -> None:
        lost.put_nowait(told.lease)

    await bus.listen(subjects.lost, LeaseLost, on_lost)
    await pair[1].die()
    assert await asyncio.wait_for(lost.get(), DEADLINE_S) == pair[1].lease
