"""Workers die and hang; requests do not. On real vLLM, seen by the `openai` client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.llm_server import PATIENCE_S, LlmServer, settled
from tests.e2e.streams import streamed_text

MODEL = "random"
PROMPTS: dict[str, dict[str, Any]] = {
    "story number 0: ": {"temperature": 0},
    "story number 1: ": {"temperature": 1.0, "seed": 1},
    "story number 2: ": {"temperature": 1.0, "seed": 2, "top_p": 0.9},
    "story number 3: ": {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5},
}
"""And their sampling. All of it is exact; of any two, at least one needs its seed for that."""
TOKENS = 400


def tell(client: openai.OpenAI, prompt: str, begun: threading.Event) -> str:
    """Return the answer to one of `PROMPTS`, streamed."""
    return streamed_text(client, prompt, TOKENS, begun, **PROMPTS[prompt])


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> dict[str, str]:
    """What the answers are when nothing happens."""
    with ThreadPoolExecutor(4) as pool:
        streams = {prompt: pool.submit(tell, client, prompt, threading.Event()) for prompt in PROMPTS}
        return {prompt: stream.result() for prompt, stream in streams.items()}


@pytest.fixture
def all_well(served: LlmServer) -> Iterator[None]:
    """Leave the graph as it was found: two workers, ready."""
    yield
    served.await_workers(2)


async def in_the_middle(pool: ThreadPoolExecutor, client: openai.OpenAI) -> dict[str, Future[str]]:
    """Streams that have all begun."""
    begun = {prompt: threading.Event() for prompt in PROMPTS}
    streams = {prompt: pool.submit(tell, client, prompt, begun[prompt]) for prompt in PROMPTS}
    for event in begun.values():
        assert await asyncio.to_thread(event.wait, PATIENCE_S)
    return streams


async def test_streams_go_on_when_their_worker_is_killed(
    served: LlmServer, client: openai.OpenAI, undisturbed: dict[str, str], all_well: None
) -> None:
    with ThreadPoolExecutor(4) as pool:
        streams = await in_the_middle(pool, client)
        os.kill(served.pid("VllmWorker_1"), signal.SIGKILL)
        answers = {prompt: stream.result() for prompt, stream in streams.items()}
    assert answers == undisturbed


async def test_streams_go_on_when_their_worker_hangs(
    served: LlmServer, client: openai.OpenAI, undisturbed: dict[str, str], all_well: None
) -> None:
    hung = served.pid("VllmWorker")
    with ThreadPoolExecutor(4) as pool:
        streams = await in_the_middle(pool, client)
        os.kill(hung, signal.SIGSTOP)
        try:
            answers = {prompt: stream.result() for prompt, stream in streams.items()}
        finally:
            os.kill(hung, signal.SIGCONT)
    assert answers == undisturbed
    # Back among the living, it stops working on what is others' now.
    await served.until(settled, "a worker still works for nobody")


async def test_streams_survive_the_bus(
    served: LlmServer, client: openai.OpenAI, undisturbed: dict[str, str], all_well: None
) -> None:
    with ThreadPoolExecutor(4) as pool:
        streams = await in_the_middle(pool, client)
        os.kill(served.pid("Nats"), signal.SIGKILL)
        answers = {prompt: stream.result() for prompt, stream in streams.items()}
    assert answers == undisturbed


async def test_what_cannot_be_continued_ends_in_an_error_not_in_something_else(
    served: LlmServer, client: openai.OpenAI, all_well: None
) -> None:
    extra = {"ignore_eos": True, "vllm_xargs": {"known_to": "an extension"}}

    def read() -> None:
        with client.completions.create(
            model=MODEL, prompt=next(iter(PROMPTS)), max_tokens=3000, stream=True, extra_body=extra
        ) as stream:
            for _ in stream:
                begun.set()

    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(read)
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        (row,) = json.loads(await asyncio.to_thread(served.command, "requests", "--json"))["requests"]
        os.kill(served.pid(row["worker"].removeprefix("e2e_")), signal.SIGKILL)
        failure = str(await asyncio.to_thread(stream.exception))
    assert "lost, and with it the state of extra_args" in failure
