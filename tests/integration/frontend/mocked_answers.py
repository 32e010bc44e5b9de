"""What mockers are asked, what they are to answer, and how to see that nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from dynamo_local.core.messages.presence import Load
from dynamo_local.core.ports import Request, Sampling
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.mocker.tokens import continuation
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, until
from tests.integration.workers.worker_parts import Worker, context_of

FAST = MockerSettings(mocker_speedup=200.0, mocker_block_size=8, mocker_max_num_batched_tokens=256)


StartMocker = Callable[[str], Awaitable[Worker]]
"""Starts a worker with the given lease."""


@asynccontextmanager
async def mockers(
    connect: Connect, subjects: Subjects, folder: Path, settings: MockerSettings = FAST
) -> AsyncIterator[StartMocker]:
    """Starts workers, and ends them all."""
    workers: list[Worker] = []

    async def start(lease: str) -> Worker:
        context = context_of(await connect(), subjects, "VllmWorker", "aggregated", lease)
        worker = Worker(context, MockerEngine(settings, folder))
        workers.append(worker)
        return await worker.start()

    yield start
    for worker in workers:
        await worker.close()
        await worker.engine.close(1.0)


def asking_for(tokens: int) -> Sampling:
    def sampling(position: int, at_most: int | None = None) -> bytes:
        limit = tokens - position if at_most is None else min(at_most, tokens - position)
        return msgspec.msgpack.encode({"max_tokens": limit, "ignore_eos": True})

    return sampling


class Reader:
    """Takes what comes for these requests; every position once, in order, and every end a regular one."""

    def __init__(self, front: FakeFrontend, wanted: Collection[str]) -> None:
        self._front = front
        self.found: dict[str, list[int]] = {name: [] for name in wanted}
        self._left = set(wanted)

    async def read(self, until: Callable[[], bool] = lambda: False) -> dict[str, list[int]]:
        """Until all have ended, or the condition is met."""
        while self._left and not until():
            outputs = await asyncio.wait_for(self._front.dispatcher.outputs(), DEADLINE_S)
            for delta in outputs.deltas:
                if delta.request_id in self._left:
                    assert delta.position == len(self.found[delta.request_id])
                    self.found[delta.request_id] += delta.token_ids
                if delta.finish is not None:
                    assert delta.finish == "length", delta
                    self._left.discard(delta.request_id)
        return self.found


async def answers(front: FakeFrontend, wanted: Collection[str]) -> dict[str, list[int]]:
    """What comes until all of these have ended."""
    return await Reader(front, wanted).read()


def right(asked: Request) -> list[int]:
    """What any mocker answers, disturbed or not."""
    assert asked.max_tokens is not None
    return continuation(asked.prompt_token_ids, asked.max_tokens, FAST.mocker_vocab_size)


def all_right(asked: Mapping[str, Request]) -> dict[str, list[int]]:
    return {name: right(one) for name, one in asked.items()}


async def nothing_left_at(front: FakeFrontend, workers: Sequence[Worker]) -> None:
    """No request, no block, no pin, no charge."""
    await until(lambda: front.dispatcher.live_requests == 0)
    for worker in workers:
        await until(lambda worker=worker: len(worker.service._outbox) == 0)  # type: ignore[misc]
        await until(lambda worker=worker: _idle(worker.context.announcer.presence.load))  # type: ignore[misc]
        assert front.local.ledger.outstanding(worker.lease) == 0


def _idle(load: Load | None) -> bool:
    return load is not None and not any((load.running, load.waiting, load.kv_usage, load.kv_pinned))
