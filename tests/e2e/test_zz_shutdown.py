"""The end, in order and by force: nothing is left either way, the processes of vLLM included."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import openai

from state.files import sockets_of
from state.processes import descendants
from state.remains import SHARED_MEMORY, segments_of
from tests.e2e.llm_server import PATIENCE_S, READY_WITHIN_S, LlmServer, none_of
from tests.integration.server_process import eventually

VLLM_PROCESSES = 2
"""Processes of one engine beside the worker's own: EngineCore and its Worker."""


SUPERVISORS = 2
"""`dynamo serve` and circusd."""


SERVICES = 3
"""Frontend, worker and planner."""


def shared_memory(server: LlmServer) -> set[Path]:
    """What processes of the server have mapped or open: others on the machine have some, too."""
    return {SHARED_MEMORY / segment.name for pid in server.tree() for segment in segments_of(pid)}


def there(files: Iterable[Path]) -> set[Path]:
    return {path for path in files if path.exists()}


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


def test_sigkill_leaves_no_orphan_and_no_shared_memory(tmp_path: Path) -> None:
    """Of a worker with all its processes, then of the server, with nobody left to tidy up after it."""
    options = ["examples.llm.graphs.agg:Frontend", "--file=examples/llm/configs/agg.yaml"]
    with LlmServer(tmp_path / "state", "killed", options) as server:
        server.await_ready()
        processes = server.tree()
        assert len(processes) >= SUPERVISORS + 4 + VLLM_PROCESSES
        first = there(shared_memory(server))
        assert first
        lease = server.state().components["killed_VllmWorker"].lease
        kill_all(descendants(server.pid("VllmWorker")))
        await_worker_in_place_of(server, lease)
        eventually(lambda: not there(first), f"shared memory of the worker that was killed is left: {first}")
        eventually(lambda: len(folders(server)) == SERVICES, f"{folders(server)}")
        processes, second = server.tree(), there(shared_memory(server))
        kill_all(resource_trackers(processes))
        server.signal(signal.SIGKILL)
        server.process.wait()
        eventually(lambda: none_of(processes), "a process outlives the server", PATIENCE_S)
        assert there(second)
        assert server.paths.statefile.exists()
        server.command("stop")
        server.assert_nothing_left()
    assert not there(second)
