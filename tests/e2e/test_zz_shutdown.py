"""The end, in order and by force: nothing is left either way, the processes of vLLM included."""

from __future__ import annotations

import signal
from pathlib import Path

import openai

from tests.e2e.llm_server import PATIENCE_S, LlmServer, none_of
from tests.integration.server_process import eventually

SHARED_MEMORY = Path("/dev/shm")
VLLM_PROCESSES = 2
"""Processes of one engine beside the worker's own: EngineCore and its Worker."""


SUPERVISORS = 2
"""`dynamo serve` and circusd."""


def shared_memory() -> set[str]:
    return {entry.name for entry in SHARED_MEMORY.iterdir()}


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


def test_sigkill_leaves_no_orphan(tmp_path: Path) -> None:
    before = shared_memory()
    options = ["examples.llm.graphs.agg:Frontend", "--file=examples/llm/configs/agg.yaml"]
    with LlmServer(tmp_path / "state", "killed", options) as server:
        server.await_ready()
        processes = server.tree()
        assert len(processes) >= SUPERVISORS + 4 + VLLM_PROCESSES
        server.signal(signal.SIGKILL)
        server.process.wait()
        eventually(lambda: none_of(processes), "a process outlives the server", PATIENCE_S)
        assert server.paths.statefile.exists()
        server.command("stop")
        server.assert_nothing_left()
    eventually(lambda: shared_memory() <= before, "shared memory is left", PATIENCE_S)
