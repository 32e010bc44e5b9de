"""The end, in order and by force: nothing is left either way, the processes of vLLM included."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from state.files import sockets_of
from state.machine.processes import descendants
from state.remains import SHARED_MEMORY, segments_of
from tests.e2e.llm_server import PATIENCE_S, READY_WITHIN_S, LlmServer, none_of
from tests.integration.server_process import eventually

VLLM_PROCESSES = 2
"""Processes of one engine beside the worker's own: EngineCore and its Worker."""

SUPERVISORS = 2
"""`dynamo serve` and circusd."""


def shared_memory_of(server: LlmServer) -> set[Path]:
    """What processes of the server have mapped or open: others on the machine have some, too."""
    return {SHARED_MEMORY / segment.name for pid in server.tree() for segment in segments_of(pid)}


def there(files: Iterable[Path]) -> set[Path]:
    return {path for path in files if path.exists()}


@pytest.mark.ends_server
def test_a_stop_lets_streams_finish_and_leaves_nothing(served: LlmServer, client: openai.OpenAI) -> None:
    processes = served.tree()
    assert len(processes) >= SUPERVISORS + 6 + 2 * VLLM_PROCESSES
    stream = client.completions.create(
        model="random",
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
    """At once: nobody is left who could tidy up."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def resource_trackers(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


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
    """Of a worker with all its processes, then of the server, with nobody left to tidy up after it."""
    processes = lora.tree()
    assert len(processes) >= SUPERVISORS + 6 + 2 * VLLM_PROCESSES
    services, killed = len(folders(lora)), descendants(lora.pid("VllmWorker"))
    first = there(SHARED_MEMORY / segment.name for pid in killed for segment in segments_of(pid))
    assert first
    lease = lora.state().components["lora_VllmWorker"].lease
    kill_all(killed)
    await_worker_in_place_of(lora, lease)
    eventually(lambda: not there(first), f"shared memory of the worker that was killed is left: {first}")
    eventually(lambda: len(folders(lora)) == services, f"{folders(lora)}")
    processes, second = lora.tree(), there(shared_memory_of(lora))
    kill_all(resource_trackers(processes))
    lora.signal(signal.SIGKILL)
    lora.process.wait()
    eventually(lambda: none_of(processes), "a process outlives the server", PATIENCE_S)
    assert there(second)
    assert lora.paths.statefile.exists()
    lora.command("stop")
    lora.assert_nothing_left()
    assert not there(second)
