"""Urgent requests pass all others on their way to an engine, and background work is not forgotten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, create_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.core.request.disaggregation import PrefillLimits
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.disaggregation.prefill_fakes import ENDLESS, Disaggregated, long_request, remote_prefill
from tests.integration.fleet_of_fakes import FakeFrontend, request, until
from tests.integration.frontend.mocked_answers import FAST, asking_for, mockers, nothing_left_at

pytestmark = pytest.mark.integration

LIMITS = PrefillLimits(max_local_prefill_length=4, max_prefill_queue_size=1000)
ONE_AT_A_TIME = replace(FAST, mocker_max_num_seqs=1)

NORMAL, BACKGROUND = 30, 3


async def ends(front: FakeFrontend, requests: int) -> list[str]:
    """Return the requests in the order in which they end."""
    found: list[str] = []
    while len(found) < requests:
        outputs = await front.dispatcher.outputs()
        found += [delta.request_id for delta in outputs.deltas if delta.finish is not None]
    return found


async def test_requests_that_waited_for_a_worker_are_answered_by_priority(
    connect: Connect, subjects: Subjects, tmp_path: Path
) -> None:
    front = await FakeFrontend(await connect(), subjects).start()
    priorities = {"batch": 7, "later": 1, "plain": 0, "second": 0, "urgent": -1, "first": -5}
    for number, (name, priority) in enumerate(priorities.items()):
        one = request(name, (number, 1, 2), sampling=asking_for(4), max_tokens=4, priority=priority)
        await front.dispatcher.submit(structs.replace(one, arrival_time=float(number)))
    await until(lambda: front.dispatcher.table.placer.waiting == len(priorities))
    async with mockers(connect, subjects, tmp_path, ONE_AT_A_TIME) as start:
        worker = await start("w")
        found = await ends(front, len(priorities))
        assert found == ["first", "urgent", "plain", "second", "later", "batch"]
        await nothing_left_at(front, [worker])
    await front.close()


async def test_urgent_prompts_are_prefilled_first_and_background_work_gets_its_share(
    connect: Connect, bus: Bus, subjects: Subjects
) -> None:
    await create_prefill_queue(bus, subjects)
    front = await FakeFrontend(await connect(), subjects, remote_of=remote_prefill(ENDLESS, LIMITS)).start()
    fleet = Disaggregated(front, PrefillQueue(bus, subjects), bus)
    decoding, prefilling = await fleet.decode_worker("d"), await fleet.prefill_worker("p")
    asked = {f"batch{number}": 1 for number in range(BACKGROUND)}
    asked |= {f"plain{number}": 0 for number in range(NORMAL)} | {"urgent": -1}
    for number, (name, priority) in enumerate(asked.items()):
        await fleet.submit(long_request(name, prompt=tuple(range(number, number + 20)), priority=priority))
    await fleet.queued(len(asked))
    order: list[str] = []
    for _ in asked:
        job, work = await prefilling.granted()
        order.append(work.request_id)
        await prefilling.finish(work)
        assert (await decoding.submitted()).priority == asked[work.request_id]
        await job.done()
    assert order[0] == "urgent"
    assert [name for name in order if name.startswith("plain")] == [f"plain{number}" for number in range(NORMAL)]
    turns = [order.index(f"batch{number}") for number in range(BACKGROUND)]
    assert turns == sorted(turns)
    assert turns[0] < 20 <= turns[1]
    await front.dispatcher.cancel(list(asked))
    await fleet.close()
