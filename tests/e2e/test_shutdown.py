"""The end, in order and by force: nothing is left either way, the processes of vLLM included."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress

import openai
import pytest

from state.files import sockets_of
from state.processes import descendants
from tests.e2e.llm_server import PATIENCE_S, READY_WITHIN_S, LlmServer, none_of, shared_memory
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


def kill_all(pids: Iterable[int]) -> None:
    """At once: nobody is left who could tidy up, resource trackers included."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def folders(server: LlmServer) -> set[str]:
    """Of the server's services."""
    sockets = sockets_of(server.paths).directory
    return {path.name for path in sockets.iterdir() if path.name.isdigit()}


def await_worker_in_place_of(server: LlmServer, lease: str | None) -> None:
    def is_there() -> bool:
        worker = next(row for row in server.ps() if row["component"] == "VllmWorker")
        return bool(worker["state"] == "ready" and worker["lease"] != lease)

    eventually(is_there, "no worker came in place of the one that was killed", READY_WITHIN_S)


@pytest.mark.ends_server
def test_sigkill_leaves_no_orphan_and_no_shared_memory(lora: LlmServer) -> None:
    """First of a worker with all its processes; then of another one with all of its own, and of the server alone."""
    before = lora.shared_memory_before
    processes = lora.tree()
    assert len(processes) >= SUPERVISORS + 6 + 2 * VLLM_PROCESSES
    of_both, folders_of_all = len(shared_memory() - before), len(folders(lora))
    assert of_both > 0
    lease = lora.state().components["lora_VllmWorker"].lease
    kill_all(descendants(lora.pid("VllmWorker")))
    await_worker_in_place_of(lora, lease)
    eventually(lambda: len(shared_memory() - before) == of_both, f"{shared_memory()}")
    eventually(lambda: len(folders(lora)) == folders_of_all, f"{folders(lora)}")
    processes = lora.tree()
    # Nobody is left who could tidy up after this worker.
    kill_all([lora.process.pid, *descendants(lora.pid("PrefillWorker"))])
    lora.process.wait()
    eventually(lambda: none_of(processes), "a process outlives the server", PATIENCE_S)
    assert lora.paths.statefile.exists()
    assert shared_memory() - before
    lora.command("stop")
    lora.assert_nothing_left()
    eventually(lambda: shared_memory() <= before, "shared memory is left", PATIENCE_S)
