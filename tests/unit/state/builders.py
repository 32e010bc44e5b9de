"""States, processes and machines to test with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import Watcher
from dynamo_local.core.process.soft_binding import Shares, ThreadTimes
from state.machine.threads import CoreWatch
from state.statefile.model import Component, Owner, Phase, Resources, State
from state.statefile.transitions import claim, entry, heard, new_state

NAMESPACE = "dynamo"
ENDPOINT = "ipc:///run/circus.sock"
OWNER = Owner(pid=4321, start_time=987654)


def empty_state(namespace: str = NAMESPACE, endpoint: str = ENDPOINT) -> State:
    return new_state(namespace, endpoint, "gpu", OWNER)


def disaggregated() -> State:
    """A state with one decode and one prefill worker, as the planner finds them at its start."""
    state = claim(empty_state(), "dynamo_Frontend", role="frontend", cmd="python -m host")
    state = claim(state, "dynamo_VllmWorker", role="decode", cmd="python -m host", devices=[0])
    return claim(state, "dynamo_PrefillWorker", role="prefill", cmd="python -m host", devices=[1])


def with_process(state: State, watcher: Watcher | str, lease: str, pid: int) -> State:
    """With a process of the watcher that was heard."""
    name = str(watcher)
    component = entry(state, name)
    return heard(state, [Presence(name, component.component, component.role, lease, pid, "ready")], lambda _: True)


@st.composite
def components(draw: st.DrawFn, device_pool: list[int], service: str, index: int) -> Component:
    """An entry that takes its devices out of the pool."""
    name = f"{NAMESPACE}_{service}" + (f"_{index}" if index else "")
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    if index == 0 and draw(st.booleans()):
        return Component(name, service, draw(text), "run it")
    phases: st.SearchStrategy[Phase | None] = st.sampled_from([None, "reserved", "starting", "retiring", "restarting"])
    count = draw(st.integers(0, min(2, len(device_pool))))
    devices = tuple(device_pool.pop() for _ in range(count))
    share = draw(st.sampled_from([1.0, 0.5, 1 / 3])) if count == 1 else 1.0
    role, phase, held = draw(text), draw(phases), Resources(devices, share)
    if phase == "reserved":
        return Component(name, service, role, "run it", held, phase=phase)
    lease, pid = draw(st.none() | text), draw(st.none() | st.integers(1, 2**22))
    return Component(name, service, role, "run it", held, lease, pid, phase)


@st.composite
def states(draw: st.DrawFn) -> State:
    """Any state that the model allows."""
    pool = draw(st.lists(st.integers(0, 99), unique=True, max_size=8))
    found: dict[str, Component] = {}
    for service in draw(st.sets(st.sampled_from(["Frontend", "VllmWorker", "PrefillWorker"]))):
        for index in {0} | draw(st.sets(st.integers(1, 4), max_size=3)):
            component = draw(components(pool, service, index))
            found[component.watcher_name] = component
    return State(
        namespace=NAMESPACE,
        circus_endpoint=draw(st.sampled_from([ENDPOINT, ""])),
        device_kind=draw(st.sampled_from(["gpu", "cpu-slot"])),
        owner=Owner(draw(st.integers(1, 2**22)), draw(st.integers(0, 2**63 - 1))),
        components=found,
        environment=draw(st.dictionaries(st.just("DYN_LOG"), st.sampled_from(["", "debug", "ä\n"]))),
    )


def in_child(body: Callable[[], None]) -> int:
    """Run the body in a forked child. Returns its exit code: 0 if it returned, -9 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(body), 0)[1])


def forked(body: Callable[[], None]) -> int:
    """Have the body run in a forked child, whose pid is returned. The child's exit code is 0 if the body returns."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return pid


@contextmanager
def python(code: str, environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed its first line, which says that it is ready. Killed at the end."""
    everything = {**(environ or {}), "PYTHONPATH": str(Path(__file__).parents[3]), "PATH": os.environ["PATH"]}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=everything
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@dataclass
class ScriptedCores(CoreWatch):
    """Sees what a test says, whatever the threads do."""

    says: tuple[Shares, Mapping[int, float]]
    looks: int = 0

    def look(
        self, own: Mapping[int, ThreadTimes], beside: Mapping[int, ThreadTimes] | None = None
    ) -> tuple[Shares, dict[int, float]]:
        self.looks += 1
        return self.says[0], dict(self.says[1])


@contextmanager
def spinning(core: int, *, nice: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that computes without a pause on that core, `nice` to others of this session."""
    bound = f"import os; os.sched_setaffinity(0, {{{core}}}); os.nice({nice}); print('ready', flush=True)\n"
    with python(f"{bound}while True: pass") as process:
        yield process
