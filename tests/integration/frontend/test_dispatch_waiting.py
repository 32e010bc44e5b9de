"""Requests that wait, are given up, or are assigned by a router that may not be there."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.bus.nats import Bus, RawMessage, Subscription
from dynamo_local.core import codec
from dynamo_local.core.messages.routing import Account, Assignment, AssignRequest, Released
from dynamo_local.core.messages.work import RequestEpoch, TokenDelta
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect, StartWorker
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, FakeWorker, request, until

pytestmark = pytest.mark.integration


# Cancelling


async def test_a_cancelled_request_is_cancelled_at_its_worker(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    await frontend.dispatcher.submit(request())
    work = await pair[0].submitted()
    await frontend.dispatcher.cancel(["r1", "unknown"])
    assert await pair[0].cancelled() == RequestEpoch("r1", 1)
    await pair[0].send(work, 0, 10)
    await frontend.dispatcher.submit(request("r2"))
    await pair[1].send(await pair[1].submitted(), 0, 20)
    assert (await frontend.output()).request_id == "r2"
    assert frontend.local.ledger.outstanding("a") == 0


async def test_a_request_cancelled_while_it_waits_reaches_no_worker(
    frontend: FakeFrontend, start_worker: StartWorker
) -> None:
    await frontend.dispatcher.submit(request("r1"))
    await frontend.dispatcher.submit(request("r2"))
    await frontend.dispatcher.cancel(["r1"])
    worker = await start_worker("a")
    assert (await worker.submitted()).request_id == "r2"
    await until(lambda: frontend.local.ledger.outstanding("a") == 3)
    assert worker.untouched


async def test_a_request_cancelled_at_once_leaves_nothing_behind(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    await frontend.dispatcher.submit(request())
    await frontend.dispatcher.cancel(["r1"])
    await frontend.dispatcher.submit(request("r2"))
    await until(lambda: sum(frontend.local.ledger.outstanding(worker.lease) for worker in pair) == 3)
    assert frontend.dispatcher.live_requests == 1


# Waiting


async def test_requests_wait_for_a_worker_and_all_are_served(frontend: FakeFrontend, start_worker: StartWorker) -> None:
    for number in range(5):
        await frontend.dispatcher.submit(request(f"r{number}"))
    await asyncio.sleep(0)
    worker = await start_worker("a")
    assert {(await worker.submitted()).request_id for _ in range(5)} == {f"r{number}" for number in range(5)}


async def test_a_worker_that_is_starting_or_draining_is_not_given_requests(
    frontend: FakeFrontend, bus: Bus, subjects: Subjects
) -> None:
    worker = await FakeWorker(bus, subjects, "a").start("starting")
    await until(lambda: bool(frontend.fleet.view.members()))
    await frontend.dispatcher.submit(request())
    await worker.announce("draining")
    await until(lambda: len(frontend.changes) == 2)
    assert worker.untouched
    await worker.announce("ready")
    assert (await worker.submitted()).request_id == "r1"


async def test_without_a_worker_a_request_fails_in_the_end(connect: Connect, subjects: Subjects) -> None:
    frontend = await FakeFrontend(await connect(), subjects, deadlines=RecoveryDeadlines(placement_s=0.01)).start()
    await frontend.dispatcher.submit(request())
    failure = await frontend.output()
    assert (failure.finish, failure.position) == ("error", 0)
    assert "no worker is ready" in (failure.error or "")
    assert frontend.dispatcher.live_requests == 0
    await frontend.close()


@pytest.mark.parametrize("garbage", [b"", b"\xc1" * 50, b"\x95\xa1w\x01\xcb" + bytes(8) + b"\x90\x63"])
async def test_garbage_harms_nothing(
    frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker], bus: Bus, garbage: bytes
) -> None:
    await frontend.dispatcher.submit(request())
    work = await pair[0].submitted()
    await bus.publish(frontend.subjects.tokens("f1"), garbage)
    await pair[0].send_all("f1", TokenDelta("unknown", 1, 0, [1]), TokenDelta("r1", 7, 0, [1]))
    await pair[0].send(work, 0, 10, finish="stop")
    assert await frontend.output() == TokenDelta("r1", 1, 0, [10], finish="stop")


# A router


class FakeRouter:
    """Answers what it is told to, and notes what it hears."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self._subscriptions: list[Subscription] = []
        self.asked: list[AssignRequest] = []
        self.released: list[Released] = []
        self.answers: list[bytes] = []

    async def start(self) -> None:
        self._subscriptions = [
            await self._bus.subscribe(self._subjects.assign, self._on_assign, queue="router"),
            await self._bus.listen(self._subjects.account, Account, self._on_account),
        ]
        await self._bus.flush()

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self._bus.flush()

    async def _on_assign(self, message: RawMessage) -> None:
        self.asked.append(codec.decode(message.data, AssignRequest))
        await self._bus.publish(message.reply, self.answers.pop(0))

    async def _on_account(self, told: Account) -> None:
        if isinstance(told, Released):
            self.released.append(told)


def assign(worker: str | None) -> bytes:
    return codec.encode(Assignment(worker=worker))


@pytest.fixture
async def router(connect: Connect, subjects: Subjects) -> FakeRouter:
    return FakeRouter(await connect(), subjects)


async def test_the_router_decides_and_hears_of_the_end(
    routed: FakeFrontend, router: FakeRouter, start_worker: StartWorker
) -> None:
    workers = await start_worker("a"), await start_worker("b")
    await routed.knows(*workers)
    await router.start()
    router.answers = [assign("b")]
    await routed.dispatcher.submit(request())
    work = await workers[1].submitted()
    assert router.asked == [AssignRequest(request_id="r1", frontend="f1", tokens=3)]
    await workers[1].send(work, 0, 10, finish="stop")
    await routed.output()
    await until(lambda: router.released == [Released(request_id="r1", frontend="f1")])


async def test_the_router_learns_which_worker_failed_the_request(
    routed: FakeFrontend, router: FakeRouter, start_worker: StartWorker
) -> None:
    workers = await start_worker("a"), await start_worker("b")
    await routed.knows(*workers)
    await router.start()
    router.answers = [assign("b"), assign("a")]
    await routed.dispatcher.submit(request())
    await workers[1].refuse(await workers[1].submitted())
    assert (await workers[0].submitted()).epoch == 2
    assert router.asked[1].avoid == ("b",)


async def test_a_router_that_knows_of_nobody_yet_is_asked_again(
    routed: FakeFrontend, router: FakeRouter, start_worker: StartWorker
) -> None:
    """Nothing changes in the frontend's own view meanwhile: it must not wait for that."""
    worker = await start_worker("a")
    await routed.knows(worker)
    await router.start()
    router.answers = [assign(None), assign(None), assign("a")]
    await routed.dispatcher.submit(request())
    assert (await worker.submitted()).epoch == 1
    assert len(router.asked) == 3


@pytest.mark.parametrize("answer", [None, b"garbage", b""])
async def test_without_a_sensible_router_the_frontend_decides_by_itself(
    routed: FakeFrontend, router: FakeRouter, start_worker: StartWorker, answer: bytes | None
) -> None:
    worker = await start_worker("a")
    await routed.knows(worker)
    if answer is not None:
        await router.start()
        router.answers = [answer]
    await routed.dispatcher.submit(request())
    work = await worker.submitted()
    assert routed.local.ledger.outstanding("a") == 3
    await worker.send(work, 0, 10, finish="stop")
    await routed.output()
    await until(lambda: routed.local.ledger.outstanding("a") == 0)


async def test_a_router_that_comes_back_is_asked_again(
    routed: FakeFrontend, router: FakeRouter, start_worker: StartWorker
) -> None:
    workers = await start_worker("a"), await start_worker("b")
    await routed.knows(*workers)
    await routed.dispatcher.submit(request("r1"))
    assert (await workers[0].submitted()).request_id == "r1"
    await router.start()
    router.answers = [assign("a")]
    await routed.dispatcher.submit(request("r2"))
    assert (await workers[0].submitted()).request_id == "r2"
    await router.stop()
    await routed.dispatcher.submit(request("r3"))
    assert (await workers[1].submitted()).request_id == "r3"


async def test_a_router_that_names_a_worker_that_is_gone_is_not_believed(
    routed: FakeFrontend, router: FakeRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker("a")
    await routed.knows(worker)
    await router.start()
    router.answers = [assign("gone")]
    await routed.dispatcher.submit(request())
    assert (await asyncio.wait_for(worker.submitted(), DEADLINE_S)).epoch == 1
