"""Workers with real vLLM come and go and are restarted under load, and no request notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.llm_server import LlmServer, settled
from tests.e2e.scaling.stories import Stories
from tests.e2e.streams import samples

STREAMS = 4
TOKENS = 120
LONG = 250
"""Of streams that are to be met by a move, with blocks to be pulled."""


@pytest.fixture
def two_workers(served: LlmServer) -> Iterator[None]:
    """Leave the graph as it was found."""
    yield
    if served.process.poll() is None:
        served.command("scale", "VllmWorker=2")


async def test_from_one_worker_to_two_and_back_without_a_failed_request(
    served: LlmServer, client: openai.OpenAI, two_workers: None
) -> None:
    def scale(number: int) -> list[str]:
        done = json.loads(served.command("scale", f"VllmWorker={number}", "--json"))
        return [outcome["watcher"] for outcome in done if outcome["done"]]

    def working(workers: list[Any]) -> bool:
        return any(w.watcher == "e2e_VllmWorker_1" and w.load is not None and w.load.running for w in workers)

    with ThreadPoolExecutor(STREAMS) as pool:
        stories = Stories.undisturbed(pool, client, STREAMS, TOKENS)
        assert await asyncio.to_thread(scale, 1) == ["e2e_VllmWorker_1"]
        clients = stories.begin(pool)
        try:
            assert await asyncio.to_thread(scale, 2) == ["e2e_VllmWorker_1"]
            await served.until(working, "the new worker gets no requests")
            assert served.state().components["e2e_VllmWorker_1"].devices == (1,)
            assert await asyncio.to_thread(scale, 1) == ["e2e_VllmWorker_1"]
            assert "e2e_VllmWorker_1" not in served.state().components
            await served.until(stories.goes_on(), "requests are not answered any more")
        finally:
            stories.end()
        for asking in clients:
            asking.result()
    assert await asyncio.to_thread(scale, 2) == ["e2e_VllmWorker_1"]
    await served.until(settled, "blocks are left")


async def test_workers_are_restarted_while_their_streams_move_with_their_kv(
    served: LlmServer, client: openai.OpenAI, two_workers: None
) -> None:
    """All devices are held: the workers are emptied first, one after the other."""

    def counted() -> tuple[float, float]:
        moved = samples(client, "dynamo_migrations_total", 'outcome="migrated",reason="drain"')
        return sum(moved), sum(samples(client, "dynamo_migrations_pulled_tokens_total"))

    workers = ("e2e_VllmWorker", "e2e_VllmWorker_1")
    before = {name: served.state().components[name] for name in workers}
    moved, pulled = counted()
    with ThreadPoolExecutor(STREAMS) as pool:
        stories = Stories.undisturbed(pool, client, STREAMS, LONG)
        clients = stories.begin(pool)
        try:
            done = json.loads(await asyncio.to_thread(served.command, "restart", "VllmWorker", "--json"))
            assert [(outcome["watcher"], outcome["done"]) for outcome in done] == [(name, True) for name in workers]
            await served.until(stories.goes_on(), "requests are not answered any more")
        finally:
            stories.end()
        for asking in clients:
            asking.result()
    after = {name: served.state().components[name] for name in workers}
    assert {name: c.devices for name, c in after.items()} == {name: c.devices for name, c in before.items()}
    assert not {c.pid for c in after.values()} & {c.pid for c in before.values()}
    now_moved, now_pulled = counted()
    assert now_moved > moved
    assert now_pulled > pulled
    await served.until(settled, "blocks are left")
