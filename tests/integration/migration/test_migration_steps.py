"""One migration, step by step: what the frontend says to whom, and what becomes of it when something comes between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from components.frontend.requests.live_requests import LiveRequest
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.admin import MigrationResult
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.work import RequestEpoch, Reserve, Submit, TokenDelta, Warm
from dynamo_local.core.migration.protocol import MigrationLimits
from dynamo_local.core.request.recovery import Survival
from dynamo_local.core.subjects import Subjects
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, request, until
from tests.integration.migration.migration_fakes import FakeMigrationTarget

pytestmark = pytest.mark.integration

OLD, NEW = RequestEpoch("r1", 1), RequestEpoch("r1", 2)
PROMPT = tuple(range(20))
PATIENT = MigrationLimits(
    reserve_s=DEADLINE_S, room_s=2 * DEADLINE_S, warm_s=DEADLINE_S, poised_s=DEADLINE_S, takeover_s=DEADLINE_S
)
"""For migrations that go on only when the test says so."""
CUTS_SOON = replace(PATIENT, poised_s=0.5)
"""Whether a token has come before or after the migration was poised."""


@dataclass
class Stage:
    """A stream on worker a, that is to migrate to worker b."""

    front: FakeFrontend
    a: FakeMigrationTarget
    b: FakeMigrationTarget
    work: Submit
    position: int = 0
    migrating: asyncio.Future[MigrationResult] = field(default_factory=asyncio.Future)

    @property
    def live(self) -> LiveRequest:
        return self.front.dispatcher.table.requests["r1"]

    def order(self) -> None:
        self.migrating = self.front.dispatcher.migrations.order(self.live, "b")

    async def token(self, **more: object) -> TokenDelta:
        """One more from the source, and what the client gets of it."""
        await self.a.send(self.work, self.position, 100 + self.position, **more)
        self.position += 1
        return await self.front.output()

    async def outcome(self) -> tuple[str, bool]:
        """How the migration ended, and whether room was given back."""
        result = await asyncio.wait_for(self.migrating, DEADLINE_S)
        if result.outcome == "migrated":
            return result.outcome, False
        return result.outcome, await self.b.given_back() == "r1"


def set_limits(front: FakeFrontend, limits: MigrationLimits) -> None:
    """Set the limits of migrations that begin from now on."""
    front.dispatcher.migrations.executor.limits = limits


@pytest.fixture
async def stage(frontend: FakeFrontend, bus: Bus, subjects: Subjects) -> Stage:
    set_limits(frontend, PATIENT)
    a = await FakeMigrationTarget(bus, subjects, "a").start()
    await frontend.knows(a)
    more: dict[str, Any] = {"cache_salt": "salt", "adapter": "pirate", "priority": 3}
    await frontend.dispatcher.submit(request("r1", PROMPT, survival=Survival(), **more))
    b = await FakeMigrationTarget(bus, subjects, "b").start()
    stage = Stage(frontend, a, b, await a.submitted())
    await frontend.knows(a, b)
    await stage.token()
    return stage


Reach = Callable[[Stage], Awaitable[None]]


async def reserving(stage: Stage) -> None:
    stage.order()
    await stage.b.asked()


async def warming(stage: Stage) -> None:
    stage.order()
    await stage.b.agree()
    await stage.b.asked()


async def poised(stage: Stage) -> None:
    stage.order()
    await stage.b.agree()
    await stage.b.agree()


async def cut(stage: Stage) -> Submit:
    set_limits(stage.front, CUTS_SOON)
    await poised(stage)
    await stage.token()
    taken = await stage.b.submitted()
    assert await stage.a.cancelled() == OLD
    return taken


async def cut_and_no_more(stage: Stage) -> None:
    await cut(stage)


BEFORE_THE_CUT = [reserving, warming]


async def test_a_migration_from_the_question_to_the_first_token(stage: Stage) -> None:
    set_limits(stage.front, CUTS_SOON)
    stage.order()
    reserve = await stage.b.agree()
    assert isinstance(reserve, Reserve)
    assert (reserve.request_id, reserve.tokens) == ("r1", 21)
    warm, reply = await stage.b.asked()
    assert isinstance(warm, Warm)
    # The last of the 21 tokens has no KV yet.
    assert (warm.request_id, warm.source, warm.token_ids) == ("r1", "a", [*PROMPT])
    assert (warm.cache_salt, warm.adapter, warm.priority) == ("salt", "pirate", 3)
    # The stream goes on meanwhile.
    await stage.token()
    await stage.b.answer(reply)
    await until(lambda: stage.live.migration.current is not None)
    await stage.token()
    taken = await stage.b.submitted()
    assert (taken.epoch, taken.position, taken.source) == (2, 3, None)
    assert taken.token_ids == [*PROMPT, 100, 101, 102]
    assert await stage.a.cancelled() == OLD
    # What the source still sends is nobody's.
    await stage.a.send(stage.work, 3, 999)
    assert await stage.a.cancelled() == OLD
    await stage.b.send(taken, 3, 103)
    assert await stage.front.output() == TokenDelta("r1", 2, 3, [103])
    result = await asyncio.wait_for(stage.migrating, DEADLINE_S)
    assert (result.outcome, result.worker) == ("migrated", "b")
    assert stage.b.keeps_room
    assert stage.front.dispatcher.migrations.statistics.outcomes == {("migrated", "hand"): 1}
    assert stage.front.local.ledger.outstanding("a") == 0
    assert stage.front.local.ledger.outstanding("b") > 0
    await stage.b.send(taken, 4, 104, finish="stop")
    assert (await stage.front.output()).finish == "stop"
    assert await stage.b.cancelled() == NEW
    assert stage.a.untouched


@pytest.mark.parametrize("reach", [reserving, warming, poised])
async def test_a_request_that_ends_meanwhile_ends_its_migration(stage: Stage, reach: Reach) -> None:
    await reach(stage)
    await stage.token(finish="stop")
    # What it was asked needs not be answered.
    assert await stage.outcome() == ("ended", True)
    assert await stage.a.cancelled() == OLD
    assert stage.b.untouched


@pytest.mark.parametrize("reach", [reserving, warming])
async def test_a_refusal_leaves_the_stream_where_it_is(stage: Stage, reach: Reach) -> None:
    stage.order()
    question, reply = await stage.b.asked()
    if reach is warming:
        await stage.b.answer(reply)
        question, reply = await stage.b.asked()
        assert isinstance(question, Warm)
    await stage.b.answer(reply, "not now")
    assert await stage.outcome() == ("stayed", True)
    assert stage.migrating.result().why == "not now"
    await stage.token()
    assert stage.b.untouched
    assert stage.live.log.current == OLD


@pytest.mark.parametrize("reach", [reserving, warming, poised])
async def test_a_client_that_leaves_ends_its_migration(stage: Stage, reach: Reach) -> None:
    await reach(stage)
    await stage.front.dispatcher.cancel(["r1"])
    assert await stage.outcome() == ("ended", True)
    assert await stage.a.cancelled() == OLD
    assert stage.b.untouched


async def test_a_client_that_leaves_after_the_cut_frees_the_destination(stage: Stage) -> None:
    await cut(stage)
    await stage.front.dispatcher.cancel(["r1"])
    assert await stage.outcome() == ("ended", True)
    assert await stage.b.cancelled() == NEW
    assert stage.a.untouched
    assert stage.front.local.ledger.outstanding("a") == stage.front.local.ledger.outstanding("b") == 0


@pytest.mark.parametrize("reach", [reserving, warming, poised])
async def test_a_source_that_is_lost_ends_the_migration_and_the_stream_is_recovered(stage: Stage, reach: Reach) -> None:
    await reach(stage)
    await stage.a.vanish()
    taken = await stage.b.submitted()
    assert (taken.epoch, taken.token_ids) == (2, [*PROMPT, 100])
    assert await stage.outcome() == ("recovered", True)
    await stage.b.send(taken, 1, 101, finish="stop")
    assert (await stage.front.output()).finish == "stop"
    assert stage.b.untouched or await stage.b.cancelled() == NEW


@pytest.mark.parametrize("how", ["vanishes", "drains", "turns", "is revoked"])
@pytest.mark.parametrize("reach", [reserving, warming, poised])
async def test_a_destination_that_goes_before_the_cut_leaves_the_stream_where_it_is(
    stage: Stage, reach: Reach, how: str
) -> None:
    await reach(stage)
    if how == "vanishes":
        await stage.b.vanish()
    elif how == "is revoked":
        await stage.front.revoke(stage.b)
    else:
        stage.b.role = "prefill" if how == "turns" else stage.b.role
        await stage.b.announce("draining" if how == "drains" else "ready")
    # At once: an answer from there would be of no use.
    assert await stage.outcome() == ("stayed", True)
    assert stage.migrating.result().why == "the destination is gone"
    assert stage.live.log.current == OLD
    await stage.token()


@pytest.mark.parametrize("how", ["vanishes", "refuses", "fails"])
async def test_a_destination_that_is_lost_after_the_cut_is_the_business_of_recovery(stage: Stage, how: str) -> None:
    taken = await cut(stage)
    if how == "vanishes":
        await stage.b.vanish()
    else:
        await stage.b.send(taken, 0, finish="error", error="no", refused=how == "refuses", failed=how == "fails")
    again = await stage.a.submitted()
    assert (again.epoch, again.token_ids) == (3, [*PROMPT, 100, 101])
    assert (await stage.outcome())[0] == "recovered"
    await stage.a.send(again, 2, 102, finish="stop")
    assert await stage.front.output() == TokenDelta("r1", 3, 2, [102], finish="stop")


async def test_a_submission_that_is_lost_is_asked_after(stage: Stage) -> None:
    """As any other: the destination knows nothing of the request, and says so."""
    taken = await cut(stage)
    await stage.b.refuse(taken)
    again = await stage.a.submitted()
    assert again.epoch == 3


async def test_a_stream_is_not_moved_twice_at_once(stage: Stage) -> None:
    await warming(stage)
    second = stage.front.dispatcher.migrations.order(stage.live, "b")
    result = await asyncio.wait_for(second, DEADLINE_S)
    assert (result.outcome, result.why) == ("stayed", "it is being migrated")


async def test_nothing_migrates_to_a_worker_that_is_not_there(stage: Stage) -> None:
    reasons = {"a": "it is there already", "c": "there is no worker that it could go to"}
    for destination, why in reasons.items():
        migrating = stage.front.dispatcher.migrations.order(stage.live, destination)
        assert (await migrating).why == why


async def test_a_migration_ends_when_its_destination_says_nothing(stage: Stage) -> None:
    set_limits(stage.front, MigrationLimits(reserve_s=0.2))
    await reserving(stage)
    assert await stage.outcome() == ("stayed", True)
    await stage.token()
    assert stage.b.untouched


# Away from workers that go


async def test_what_has_no_token_yet_is_placed_again(frontend: FakeFrontend, bus: Bus, subjects: Subjects) -> None:
    a = await FakeMigrationTarget(bus, subjects, "a").start()
    await frontend.knows(a)
    await frontend.dispatcher.submit(request())
    await a.submitted()
    b = await FakeMigrationTarget(bus, subjects, "b").start()
    await frontend.knows(a, b)
    await a.announce("draining")
    assert await a.cancelled() == RequestEpoch("r1", 1)
    taken = await b.submitted()
    assert (taken.epoch, taken.position) == (2, 0)
    assert b.unasked


@pytest.mark.parametrize("how", ["draining", "revoked", "turned"])
async def test_a_worker_that_goes_is_left(stage: Stage, how: str) -> None:
    set_limits(stage.front, CUTS_SOON)
    if how == "draining":
        await stage.a.announce("draining")
    elif how == "revoked":
        await stage.front.revoke(stage.a)
    else:
        stage.a.role = "prefill"
        await stage.a.announce("ready")
    await stage.b.agree()
    await stage.b.agree()
    await stage.token()
    assert (await stage.b.submitted()).epoch == 2
    assert await stage.a.cancelled() == OLD


async def test_everything_stays_while_there_is_no_other_worker(
    frontend: FakeFrontend, bus: Bus, subjects: Subjects
) -> None:
    a = await FakeMigrationTarget(bus, subjects, "a").start()
    await frontend.knows(a)
    await frontend.dispatcher.submit(request(survival=Survival()))
    work = await a.submitted()
    await a.announce("draining")
    await until(lambda: not frontend.fleet.view.routable())
    await a.send(work, 0, 100)
    assert (await frontend.output()).token_ids == [100]
    assert a.untouched
    # The first one that comes is told at once.
    b = await FakeMigrationTarget(bus, subjects, "b", agrees=True).start()
    assert (await b.submitted()).epoch == 2


async def test_a_frontend_that_drains_migrates_nothing(stage: Stage) -> None:
    stage.front.dispatcher.migrations.stop()
    await stage.a.announce("draining")
    await until(lambda: [p.lease for p in stage.front.fleet.view.routable()] == ["b"])
    ordered = stage.front.dispatcher.migrations.order(stage.live, "b")
    assert (await asyncio.wait_for(ordered, DEADLINE_S)).why == "the frontend is draining"
    await stage.token(finish="stop")
    assert stage.b.unasked
    assert stage.b.untouched


async def test_who_has_turned_a_request_down_is_asked_again_only_after_others(
    stage: Stage, bus: Bus, subjects: Subjects
) -> None:
    c = await FakeMigrationTarget(bus, subjects, "c").start()
    await stage.front.knows(stage.a, stage.b, c)
    await stage.a.announce("draining")
    _, reply = await c.asked()
    await c.answer(reply, "no room")
    _, reply = await stage.b.asked()
    await stage.b.answer(reply, "no room")
    await c.asked()


async def test_a_request_that_loses_its_worker_before_its_migration_begins_is_not_migrated(stage: Stage) -> None:
    stage.order()
    # Nothing is awaited between the two: the migration's task has not run yet.
    await stage.front.dispatcher.table.lose(stage.live, OLD.epoch)
    result = await asyncio.wait_for(stage.migrating, DEADLINE_S)
    assert (result.outcome, result.why) == ("recovered", "a worker was lost")
    assert stage.b.unasked


async def test_who_does_not_answer_is_not_asked_to_take_others_in(
    frontend: FakeFrontend, bus: Bus, subjects: Subjects
) -> None:
    a = await FakeMigrationTarget(bus, subjects, "a").start()
    await frontend.knows(a)
    for number in range(2):
        await frontend.dispatcher.submit(request(f"r{number}", PROMPT, survival=Survival()))
        await a.send(await a.submitted(), 0, 100)
        await frontend.output()
    # It looks freer than the other one, as the dead do.
    b, c = FakeMigrationTarget(bus, subjects, "b", deaf=True), FakeMigrationTarget(bus, subjects, "c")
    b.load, c.load = Load(0, 0, 0.0, age_s=0.0), Load(1, 0, 0.5, age_s=0.0)
    await b.start()
    await c.start()
    await frontend.knows(a, b, c)
    migrations, live = frontend.dispatcher.migrations, frontend.dispatcher.table.requests
    first = await asyncio.wait_for(migrations.order(live["r0"], None), DEADLINE_S)
    assert (first.outcome, first.worker) == ("stayed", "b")
    migrations.order(live["r1"], None)
    question, reply = await c.asked()
    assert question.request_id == "r1"
    await c.answer(reply, "no")


async def test_migrations_from_one_source_are_few_at_a_time(
    frontend: FakeFrontend, bus: Bus, subjects: Subjects
) -> None:
    a = await FakeMigrationTarget(bus, subjects, "a").start()
    await frontend.knows(a)
    for number in range(6):
        await frontend.dispatcher.submit(request(f"r{number}", PROMPT, survival=Survival()))
        await a.send(await a.submitted(), 0, 100)
        await frontend.output()
    b = await FakeMigrationTarget(bus, subjects, "b").start()
    await frontend.knows(a, b)
    await a.announce("draining")
    first = [await b.asked() for _ in range(4)]
    assert {question.request_id for question, _ in first} == {f"r{number}" for number in range(4)}
    assert b.unasked
    await b.answer(first[0][1], "no room")
    question, _ = await b.asked()
    assert question.request_id == "r4"


async def test_the_destination_is_the_freest(stage: Stage, bus: Bus, subjects: Subjects) -> None:
    stage.b.load = Load(1, 0, 0.5, age_s=0.0)
    await stage.b.announce("ready")
    c = FakeMigrationTarget(bus, subjects, "c")
    c.load = Load(1, 0, 0.2, age_s=0.0)
    await c.start()
    await stage.front.knows(stage.a, stage.b, c)
    migrating = stage.front.dispatcher.migrations.order(stage.live, None)
    question, reply = await c.asked()
    assert isinstance(question, Reserve)
    await c.answer(reply, "no")
    assert (await migrating).worker == "c"
    assert stage.b.unasked
