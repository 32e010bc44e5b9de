"""vLLM's own processes die under a worker that lives: its streams go on elsewhere, and it comes back."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.llm_server import PATIENCE_S, LlmServer, child, settled
from tests.e2e.streams import requests, streamed_text

MODEL = "random"
STREAMS = 4
TOKENS = 600

WELL_BELOW_THE_DRAIN_S = PATIENCE_S / 2
"""The workers' drain deadline is `PATIENCE_S`."""


def tell(client: openai.OpenAI, number: int, begun: threading.Event) -> str:
    """Return the greedy answer to prompt `number`, streamed."""
    return streamed_text(client, f"engine number {number}: ", TOKENS, begun, temperature=0)


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> list[str]:
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda number: tell(client, number, threading.Event()), range(STREAMS)))


@pytest.mark.parametrize("killed", ["EngineCore", "Worker"])
async def test_streams_go_on_when_a_process_of_an_engine_is_killed(
    served: LlmServer, client: openai.OpenAI, undisturbed: list[str], killed: str
) -> None:
    begun = [threading.Event() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(tell, client, number, begun[number]) for number in range(STREAMS)]
        assert all(event.wait(PATIENCE_S) for event in begun)
        worker = requests(served)[0]["worker"].removeprefix(f"{served.paths.namespace}_")
        engine_core = child(served.pid(worker), "EngineCore")
        os.kill(child(engine_core, "Worker") if killed == "Worker" else engine_core, signal.SIGKILL)
        answers = [stream.result(WELL_BELOW_THE_DRAIN_S) for stream in streams]
    assert answers == undisturbed
    await served.until(settled, "the worker whose engine died is not back")
