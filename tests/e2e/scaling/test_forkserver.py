"""Real vLLM in forked processes: workers and the frontend of the shared graph, all from one import."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import openai

from dynamo_local.core.names import WATCHER_ENV
from state.machine.processes import start_time
from tests.chaos.processes import command_of
from tests.e2e.llm_server import PATIENCE_S, LlmServer
from tests.integration.server_process import eventually, parent_of

WORKER = "e2e_VllmWorker_1"
FORKSERVER = "e2e_ForkServer"


def forkserver_of(served: LlmServer) -> int:
    marked = [each.pid for each in served.processes() if each.environ[WATCHER_ENV] == FORKSERVER]
    # The others have been forked from it, to load weights.
    (found,) = [pid for pid in marked if parent_of(pid) not in marked]
    return found


def worker_of(served: LlmServer) -> int | None:
    return served.state().components[WORKER].pid


def says_something(client: openai.OpenAI) -> bool:
    answer = client.completions.create(model="random", prompt="hello", max_tokens=8, extra_body={"ignore_eos": True})
    return answer.usage is not None and answer.usage.completion_tokens == 8


def test_workers_and_frontend_are_forked_from_one_import(served: LlmServer) -> None:
    forkserver = forkserver_of(served)
    forked = [component.pid for component in served.state().components.values() if component.role != "bus"]
    found = {parent_of(pid) for pid in forked if pid is not None and pid != forkserver}
    parents = {pid for pid in found if pid is not None}
    # A worker that was started again is forked by a process that has loaded its weights, which is a fork, too. The
    # router imports nothing that takes long.
    importers = {parent_of(pid) if b"forkserver.prepared" in command_of(pid) else pid for pid in parents}
    assert importers == {forkserver, served.circusd_pid()}
    assert len(list(Path(f"/proc/{forkserver}/task").iterdir())) == 1


def test_an_engine_computes_in_a_session_of_its_own(served: LlmServer) -> None:
    """What wakes up for moments beside it would wait for its share of the session otherwise."""
    served.await_workers(2)
    tree = served.tree()
    hosts = {pid for component in served.state().components.values() if (pid := component.pid) in tree}
    models = {pid for pid in tree if _is_model(pid)}
    assert len({os.getsid(pid) for pid in models}) == len(models) == 2
    assert {os.getsid(pid) for pid in models} == {parent_of(pid) for pid in models}
    assert not {os.getsid(pid) for pid in hosts} & {os.getsid(pid) for pid in models}


def test_a_model_has_no_thread_of_a_process_group(served: LlmServer) -> None:
    """A thread of gloo would wake up a hundred times a second (tests/e2e/models/test_lone_process_group.py)."""
    served.await_workers(2)
    models = [pid for pid in served.tree() if _is_model(pid)]
    assert models
    for pid in models:
        threads = [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
        assert "gloo_tcp_loop" not in threads


def test_a_worker_dies_with_its_launcher_and_the_next_one_serves(served: LlmServer, client: openai.OpenAI) -> None:
    served.await_workers(2)
    first = worker_of(served)
    assert first is not None
    marked = [each.pid for each in served.processes() if each.environ[WATCHER_ENV] == WORKER]
    (launcher,) = [pid for pid in marked if parent_of(pid) == served.circusd_pid()]
    engine = [pid for pid in served.tree() if parent_of(pid) == first]
    assert engine
    os.kill(launcher, signal.SIGKILL)
    for pid in (first, *engine):
        eventually(lambda pid=pid: start_time(pid) is None, f"{pid} outlives the launcher", PATIENCE_S)  # type: ignore[misc]
    served.await_workers(2)
    assert worker_of(served) not in (first, None)
    assert says_something(client)


def test_workers_outlive_the_forkserver_and_the_next_one_forks(served: LlmServer, client: openai.OpenAI) -> None:
    served.await_workers(2)
    before, forkserver = worker_of(served), forkserver_of(served)
    assert before is not None
    os.kill(forkserver, signal.SIGKILL)
    eventually(lambda: start_time(forkserver) is None, "the fork server lives on", PATIENCE_S)
    assert says_something(client)
    assert start_time(before) is not None
    os.kill(before, signal.SIGKILL)
    # It is forked once the next forkserver has imported vLLM.
    eventually(lambda: worker_of(served) not in (before, None), "the worker was not started again", PATIENCE_S)
    served.await_workers(2)
    assert says_something(client)


def test_a_forked_worker_uses_as_many_threads_as_it_holds_cores(served: LlmServer) -> None:
    """An OpenMP that was loaded in another process has read its settings there."""
    served.await_workers(2)
    worker = worker_of(served)
    tree = served.tree()
    engines = [pid for pid in tree if parent_of(pid) == worker]
    models = [pid for pid in tree if parent_of(pid) in engines and _is_model(pid)]
    assert models
    for pid in models:
        status = Path(f"/proc/{pid}/status").read_text()
        allowed = re.search(r"Cpus_allowed_list:\s*(\S+)", status)
        assert allowed is not None
        assert allowed[1].isdigit(), f"not bound to its one core: {allowed[1]}"


def test_no_process_and_no_stream_notices_the_death_of_circusd(served: LlmServer, client: openai.OpenAI) -> None:
    """The last test here: afterwards circusd is not the parent of what it runs."""
    served.await_workers(2)
    before = {name: component.pid for name, component in served.state().components.items()}
    circusd = served.circusd_pid()
    stream = client.completions.create(
        model="random", prompt="hello", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [next(stream)]
    os.kill(circusd, signal.SIGKILL)
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    served.line("another circusd runs and has")
    assert {name: component.pid for name, component in served.state().components.items()} == before
    assert served.circusd_pid() != circusd
    # What it did not start itself is started again as ever.
    os.kill(before[WORKER] or 0, signal.SIGKILL)
    eventually(lambda: worker_of(served) not in (before[WORKER], None), "the worker was not started again", PATIENCE_S)
    served.await_workers(2)
    assert says_something(client)


def _is_model(pid: int) -> bool:
    return b"VLLM::Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
