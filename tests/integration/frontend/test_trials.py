"""A frontend and its suspects, step by step, with workers that do what a test tells them to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from components.frontend.migration.state import MigrationState
from dynamo_local.core.messages.presence import Exclusive
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.request.recovery import CLEARING_TOKENS, Survival
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect, StartWorker
from tests.integration.disaggregation.prefill_fakes import Disaggregated, long_request
from tests.integration.fleet_of_fakes import PATIENT, FakeFrontend, FakeWorker, request

pytestmark = pytest.mark.integration

EXACT = Survival()


async def lose_two(frontend: FakeFrontend, start_worker: StartWorker) -> None:
    """Have two engines die under r1."""
    await frontend.dispatcher.submit(request(survival=EXACT))
    for lease in ("dies1", "dies2"):
        worker = await start_worker(lease)
        work = await worker.submitted()
        assert not work.exclusive
        await worker.die()


async def tried_by(worker: FakeWorker) -> Submit:
    work = await worker.submitted()
    assert (work.request_id, work.exclusive, work.source, work.hold_s) == ("r1", True, None, 0.0)
    return work


async def test_it_is_tried_alone_until_it_is_cleared(frontend: FakeFrontend, start_worker: StartWorker) -> None:
    await lose_two(frontend, start_worker)
    worker = await start_worker("w")
    work = await tried_by(worker)
    # Others wait meanwhile.
    await frontend.dispatcher.submit(request("r2"))
    await worker.send(work, 0, *range(CLEARING_TOKENS - 1))
    await frontend.output()
    assert worker.untouched
    assert worker.ends == 0
    await worker.send(work, CLEARING_TOKENS - 1, 99)
    await frontend.output()
    other = await worker.submitted()
    assert (other.request_id, other.exclusive) == ("r2", False)


async def test_it_fails_with_the_engine_that_dies_of_it(frontend: FakeFrontend, start_worker: StartWorker) -> None:
    await lose_two(frontend, start_worker)
    worker = await start_worker("w")
    work = await tried_by(worker)
    await worker.send(work, 0, 10)
    await frontend.output()
    await worker.die()
    failure = await frontend.output()
    assert (failure.finish, failure.fault) == ("error", "deaths")
    assert failure.error == "3 engines died while they worked on this request, the last one on nothing else"
    assert frontend.dispatcher.live_requests == 0


async def test_a_worker_that_vanishes_in_a_trial_is_followed_by_another_one(
    frontend: FakeFrontend, start_worker: StartWorker
) -> None:
    await lose_two(frontend, start_worker)
    for lease in ("vanishes", "too"):
        worker = await start_worker(lease)
        await tried_by(worker)
        await worker.vanish()
    worker = await start_worker("w")
    work = await tried_by(worker)
    await worker.send(work, 0, 10, finish="stop")
    assert (await frontend.output()).finish == "stop"


async def test_a_worker_is_told_until_it_has_understood(frontend: FakeFrontend, start_worker: StartWorker) -> None:
    await lose_two(frontend, start_worker)
    worker = await start_worker("w")
    worker.deaf_to_ends = 2
    work = await tried_by(worker)
    await worker.send(work, 0, *range(CLEARING_TOKENS))
    await frontend.output()
    await frontend.knows(worker)
    assert worker.ends == 3


async def test_a_suspect_does_not_wait_for_ever(connect: Connect, subjects: Subjects) -> None:
    hasty = replace(PATIENT, recovery_s=1.0)
    frontend = await FakeFrontend(await connect(), subjects, deadlines=hasty).start()
    bus = await connect()

    async def start(lease: str) -> FakeWorker:
        return await FakeWorker(bus, subjects, lease).start()

    await lose_two(frontend, start)
    taken = await start("w")
    await taken.is_set_apart(Exclusive("r", "another frontend", free=True))
    failure = await frontend.output()
    assert failure.error is not None
    assert "no worker could be set apart" in failure.error
    assert failure.fault is None
    await frontend.close()


async def test_prefill_workers_die_of_it_too_and_try_nothing(fleet: Disaggregated, decode: FakeWorker) -> None:
    prefill = [await fleet.prefill_worker(lease) for lease in ("p1", "p2", "p3")]
    await fleet.submit(long_request())
    for worker in prefill[:2]:
        await worker.granted()
        await worker.die()
    work = await tried_by(decode)
    assert fleet.outcomes["prefilled elsewhere"] == 0
    await decode.send(work, 0, 10, finish="stop")
    assert (await fleet.output()).finish == "stop"


async def test_the_engine_that_it_moves_to_counts(frontend: FakeFrontend, pair: tuple[FakeWorker, FakeWorker]) -> None:
    source, destination = pair
    await frontend.dispatcher.submit(request(survival=EXACT))
    work = await source.submitted()
    await source.send(work, 0, 10)
    await frontend.output()
    live = frontend.dispatcher.table.requests["r1"]
    live.recovery.engine_died()
    live.migration.begin(MigrationState(destination.lease, "hand"))
    await destination.die()
    assert await source.cancelled() == RequestEpoch("r1", 1)
    assert (await tried_by(source)).position == 1
