"""The end, in order and by force: nothing is left either way, the processes of vLLM included."""

from __future__ import annotations

import signal

import openai
import pytest

from tests.e2e.llm_server import PATIENCE_S, LlmServer, none_of, shared_memory
from tests.integration.server_process import eventually

VLLM_PROCESSES = 2
"""Processes of one engine beside the worker's own: EngineCore and its Worker."""


SUPERVISORS = 2
"""`dynamo serve` and circusd."""


@pytest.mark.ends_server
def test_a_stop_lets_streams_finish_and_leaves_nothing(served: LlmServer, client: openai.OpenAI) -> None:
    processes = served.tree()
    assert len(processes) >= SUPERVISORS + 6 + 2 * VLLM_PROCESSES
    stream = client.completions.create(
        model="quickstart",
        prompt="last words",
        max_tokens=500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = [next(stream)]
    served.signal(signal.SIGTERM)
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    assert served.end(PATIENCE_S) == 0
    assert none_of(processes)
    served.assert_nothing_left()


@pytest.mark.ends_server
def test_sigkill_leaves_no_orphan(lora: LlmServer) -> None:
    processes = lora.tree()
    assert len(processes) >= SUPERVISORS + 6 + 2 * VLLM_PROCESSES
    lora.signal(signal.SIGKILL)
    lora.process.wait()
    eventually(lambda: none_of(processes), "a process outlives the server", PATIENCE_S)
    assert lora.paths.statefile.exists()
    lora.command("stop")
    lora.assert_nothing_left()
    eventually(lambda: shared_memory() <= lora.shared_memory_before, "shared memory is left", PATIENCE_S)
