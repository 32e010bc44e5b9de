"""Workers die and hang; requests do not. On real vLLM, seen by the `openai` client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest

from dynamo_local.core.messages import Presence
from tests.e2e.llm_server import LlmServer, settled

MODEL = "quickstart"
PROMPTS = [f"story number {number}: " for number in range(4)]
TOKENS = 700


def tell(client: openai.OpenAI, prompt: str, **options: Any) -> list[str]:
    """The pieces of an answer as they come."""
    stream = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
        **{"temperature": 0, **options},
    )
    return [chunk.choices[0].text for chunk in stream if chunk.choices]


@pytest.fixture
def undisturbed(client: openai.OpenAI) -> dict[str, str]:
    """What greedy answers are when nothing happens."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(PROMPTS, pool.map(lambda prompt: "".join(tell(client, prompt)), PROMPTS), strict=True))


@pytest.fixture
def all_well(served: LlmServer) -> Iterator[None]:
    """Leave the graph as it was found: two workers, ready."""
    yield
    served.await_workers(2)


def working(watcher: str) -> Any:
    def condition(workers: list[Presence]) -> bool:
        return any(w.watcher == watcher and w.load is not None and w.load.running for w in workers)

    return condition


def start(pool: ThreadPoolExecutor, client: openai.OpenAI) -> dict[str, Future[list[str]]]:
    return {prompt: pool.submit(tell, client, prompt) for prompt in PROMPTS}


async def test_streams_go_on_when_their_worker_is_killed(
    served: LlmServer, client: openai.OpenAI, undisturbed: dict[str, str], all_well: None
) -> None:
    with ThreadPoolExecutor(4) as pool:
        streams = start(pool, client)
        await served.until(working("e2e_VllmWorker_1"), "the worker has nothing to do")
        os.kill(served.pid("VllmWorker_1"), signal.SIGKILL)
        answers = {prompt: "".join(stream.result()) for prompt, stream in streams.items()}
    assert answers == undisturbed


async def test_streams_go_on_when_their_worker_hangs(
    served: LlmServer, client: openai.OpenAI, undisturbed: dict[str, str], all_well: None
) -> None:
    hung = served.pid("VllmWorker")
    with ThreadPoolExecutor(4) as pool:
        streams = start(pool, client)
        await served.until(working("e2e_VllmWorker"), "the worker has nothing to do")
        os.kill(hung, signal.SIGSTOP)
        try:
            answers = {prompt: "".join(stream.result()) for prompt, stream in streams.items()}
        finally:
            os.kill(hung, signal.SIGCONT)
    assert answers == undisturbed
    # Back among the living, it stops working on what is others' now.
    await served.until(settled, "a worker still works for nobody")


async def test_streams_survive_the_bus(
    served: LlmServer, client: openai.OpenAI, undisturbed: dict[str, str], all_well: None
) -> None:
    with ThreadPoolExecutor(4) as pool:
        streams = start(pool, client)
        await served.until(working("e2e_VllmWorker"), "the worker has nothing to do")
        os.kill(served.pid("Nats"), signal.SIGKILL)
        answers = {prompt: "".join(stream.result()) for prompt, stream in streams.items()}
    assert answers == undisturbed


async def test_what_cannot_be_continued_ends_in_an_error_not_in_something_else(
    served: LlmServer, client: openai.OpenAI, all_well: None
) -> None:
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(tell, client, prompt, temperature=1.0, seed=1) for prompt in PROMPTS]
        await served.until(working("e2e_VllmWorker"), "the worker has nothing to do")
        os.kill(served.pid("VllmWorker"), signal.SIGKILL)
        failures = [str(error) for stream in streams if (error := stream.exception()) is not None]
    assert failures
    assert all("lost, and with it the state of seed" in failure for failure in failures)
