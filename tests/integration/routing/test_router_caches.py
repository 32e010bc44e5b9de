"""A router knows what workers have cached: when they join and die, and after it has missed something."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.kv import KvChanges
from dynamo_local.core.messages.presence import LeaseRevoked
from dynamo_local.core.messages.routing import RoutesAnswer, RoutesQuestion
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.routing.caches.index import pack
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, until
from tests.integration.nats_process import NatsProcess
from tests.integration.routing.router_scene import Asker, counts_of, running_router, running_worker

pytestmark = pytest.mark.integration

PROMPT = list(range(41))
CACHED = 40


@pytest.mark.parametrize("revision", [FIRST_OF_MAIN, "chat@1"])
async def test_a_prompt_returns_to_the_worker_that_has_computed_it(
    connect: Connect, subjects: Subjects, revision: str
) -> None:
    scope = Subjects(subjects.namespace, revision)
    async with AsyncExitStack() as stack:
        for lease in "ab":
            await stack.enter_async_context(running_worker(await connect(), scope, lease))
        router = await stack.enter_async_context(running_router(await connect(), subjects))
        asker = Asker(await connect(), scope)
        first = await asker.ask(PROMPT)
        assert (first.cached, first.needs_blocks) == (0, True)
        assert first.worker is not None
        await asker.submit(first.worker, PROMPT)
        await until(lambda: (counts_of(router).index_blocks or 0) >= CACHED // 4)
        again = await asker.ask([*PROMPT, 1, 2, 3])
        assert (again.worker, again.cached) == (first.worker, CACHED)
        counts = counts_of(router)
        assert (counts.assigned, counts.routed_tokens, counts.predicted_tokens) == (2, 41 + 44, CACHED)


async def test_the_latest_assignments_are_told_with_their_candidates(connect: Connect, subjects: Subjects) -> None:
    revision = Subjects(subjects.namespace, "chat@1")
    async with AsyncExitStack() as stack:
        for lease in "ab":
            await stack.enter_async_context(running_worker(await connect(), subjects, lease))
        router = await stack.enter_async_context(running_router(await connect(), subjects))
        asker, other = Asker(await connect(), subjects), Asker(await connect(), revision)
        chosen = (await asker.ask(PROMPT)).worker
        assert (await other.ask(PROMPT)).worker is None

        async def told(*revisions: str) -> RoutesAnswer:
            question = RoutesQuestion(10, revisions or None)
            return await asker.bus.ask(subjects.routes(router.lease), question, RoutesAnswer, timeout_s=DEADLINE_S)

        answer = await told()
        assert answer.policy == "kv"
        assert [(each.revision, each.worker, each.tokens) for each in answer.routes] == [
            ("chat@1", None, len(PROMPT)),
            (FIRST_OF_MAIN, chosen, len(PROMPT)),
        ]
        assert {each.worker for each in answer.routes[1].candidates} == {"a", "b"}
        assert (await told(FIRST_OF_MAIN)).routes[0].request_id == answer.routes[1].request_id


async def test_a_burst_of_one_new_prefix_goes_to_one_worker(connect: Connect, subjects: Subjects) -> None:
    async with AsyncExitStack() as stack:
        for lease in "ab":
            await stack.enter_async_context(running_worker(await connect(), subjects, lease))
        await stack.enter_async_context(running_router(await connect(), subjects))
        asker = Asker(await connect(), subjects)
        prefix = list(range(400))
        answers = [await asker.ask([*prefix, number], release=False) for number in range(3)]
        assert len({answer.worker for answer in answers}) == 1
        assert [answer.cached for answer in answers] == [0, 400, 400]


async def test_a_router_that_starts_later_and_one_that_restarts_know_all(connect: Connect, subjects: Subjects) -> None:
    async with running_worker(await connect(), subjects, "a"):
        asker = Asker(await connect(), subjects)
        await asker.submit("a", PROMPT)
        for _ in range(2):
            async with running_router(await connect(), subjects) as router:
                await until(lambda: counts_of(router).index_blocks == CACHED // 4)
                assert counts_of(router).out_of_step == 0
                assert (await asker.ask(PROMPT)).cached == CACHED


async def test_a_worker_that_joins_is_known_and_one_that_dies_leaves_nothing(
    connect: Connect, subjects: Subjects, bus: Bus
) -> None:
    async with running_router(await connect(), subjects) as router, AsyncExitStack() as stack:
        asker = Asker(await connect(), subjects)
        worker = await stack.enter_async_context(running_worker(await connect(), subjects, "a"))
        await asker.submit("a", PROMPT)
        await until(lambda: counts_of(router).index_blocks == CACHED // 4)
        await stack.enter_async_context(running_worker(await connect(), subjects, "b"))
        await worker.announce("failed")
        await until(lambda: counts_of(router).index_blocks == 0)
        # What it has sent last arrives late.
        await bus.send(subjects.kv_events("a"), KvChanges("a", 2, stored=pack([1])))
        await bus.flush()
        answer = await asker.ask(PROMPT)
        assert (answer.worker, answer.cached) == ("b", 0)
        await until(lambda: counts_of(router).out_of_step == 0)
        assert counts_of(router).index_blocks == 0


async def test_of_a_worker_whose_lease_is_void_nothing_is_known(connect: Connect, subjects: Subjects, bus: Bus) -> None:
    async with running_router(await connect(), subjects) as router, running_worker(await connect(), subjects, "a"):
        asker = Asker(await connect(), subjects)
        await asker.submit("a", PROMPT)
        await until(lambda: counts_of(router).index_blocks == CACHED // 4)
        await bus.send(subjects.revoked, LeaseRevoked(lease="a"))
        await until(lambda: counts_of(router).index_blocks == 0)
        await asker.submit("a", [*PROMPT, *PROMPT])
        assert (await asker.ask(PROMPT)).worker is None


async def test_a_gap_is_closed_by_a_repetition(connect: Connect, subjects: Subjects, bus: Bus) -> None:
    async with running_router(await connect(), subjects) as router, running_worker(await connect(), subjects, "a"):
        asker = Asker(await connect(), subjects)
        await asker.submit("a", PROMPT)
        await until(lambda: counts_of(router).index_blocks == CACHED // 4)
        # As if the router had missed what came before, in which these blocks were removed again.
        await bus.send(subjects.kv_events("a"), KvChanges("a", 50, stored=pack(range(100))))
        await until(lambda: counts_of(router).index_blocks == CACHED // 4 and counts_of(router).out_of_step == 0)
        assert (await asker.ask(PROMPT)).cached == CACHED


async def test_what_was_told_while_the_connection_was_lost_is_asked_for(
    own_nats: NatsProcess, subjects: Subjects
) -> None:
    async def connected() -> Bus:
        bus = await Bus.connect(own_nats.address, name="test")
        stack.push_async_callback(bus.close)
        return bus

    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(running_worker(await connected(), subjects, "a"))
        router = await stack.enter_async_context(running_router(await connected(), subjects))
        asker = Asker(await connected(), subjects)
        await until(lambda: counts_of(router).out_of_step == 0 and router.context.bus.connected)
        await asker.submit("a", PROMPT)
        await until(lambda: counts_of(router).index_blocks == CACHED // 4)
        buses = [router.context.bus, worker.context.bus, asker.bus]
        before = [bus.connections for bus in buses]
        own_nats.kill()
        await until(lambda: not any(bus.connected for bus in buses))
        own_nats.start()
        # A connection that is there again has its subscriptions a moment later, when it is counted.
        await until(lambda: all(bus.connections > count for bus, count in list(zip(buses, before, strict=True))[1:]))
        await worker.context.bus.flush()
        await asker.submit("a", [7] * 41)
        await until(lambda: counts_of(router).index_blocks == 2 * CACHED // 4)
        assert (await asker.ask([7] * 41)).cached == CACHED
