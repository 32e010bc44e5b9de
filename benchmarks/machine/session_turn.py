"""`python -m benchmarks.machine.session_turn LAYOUT SECONDS`: who waits for a core beside engines that leave none idle.

There is one engine for each core. Its scheduler and its model, bound to that core, hand a step back and forth as those
of vLLM do; threads that wake up now and then stand for its others. Its host is awake for a moment in each step.
Clients, in sessions of their own, wake up fifty times a second. The program prints one line of JSON for each process,
which has taken at least one measurement, however late it came to run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NoReturn, get_args

from benchmarks.harness.spread import quantile
from dynamo_local.engine.vllm.patches.tuning import FutexEvent
from dynamo_local.process.ancestry import prepare_forks

Layout = Literal["one session", "engines apart", "services apart"]
"""All in one session; engines in sessions of their own; each engine with its host in a session of its own."""

_SCHEDULING_S = 0.8e-3
_STEP_S = 9e-3
_AT_HOST_S = 0.6e-3
_CLIENT_EVERY_S = 20e-3
_AT_CLIENT_S = 2e-3
_CLIENTS = 2
_TICKS_S = 10e-3
_TICKING = 6
"""Threads of an engine: 600 wake-ups a second, as those of vLLM have while it decodes 70 steps in a second."""
_LONGEST_WAIT_S = 1.0


def main(layout: Layout, seconds: float) -> None:
    cores = sorted(os.sched_getaffinity(0))
    until = time.monotonic() + seconds
    prepare_forks()
    with tempfile.TemporaryDirectory() as scratch:
        clients = [_fork(lambda: _client(until)) for _ in range(_CLIENTS)]
        server = _fork(lambda: _serve(layout, cores, Path(scratch), until))
        _await(*clients, server)


def _serve(layout: Layout, cores: Sequence[int], scratch: Path, until: float) -> None:
    os.setsid()
    pids = [_fork(lambda core=core: _service(layout, core, scratch, until)) for core in cores]  # type: ignore[misc]
    _await(*pids)


def _service(layout: Layout, core: int, scratch: Path, until: float) -> None:
    if layout == "services apart":
        os.setsid()
    reading, writing = os.pipe()
    engine = _fork(lambda: _engine(layout, core, scratch, writing, until))
    os.close(writing)
    _host(reading, until)
    _await(engine)


def _engine(layout: Layout, core: int, scratch: Path, host: int, until: float) -> None:
    if layout == "engines apart":
        os.setsid()
    os.sched_setaffinity(0, {core})
    paths = [str(scratch / f"{core}-asked"), str(scratch / f"{core}-done")]
    asked, done = (FutexEvent(path, create=True) for path in paths)
    model = _fork(lambda: _model(paths[0], paths[1], until))
    steps = 0
    while not steps or time.monotonic() < until:
        asked.notify()
        steps += 1
        os.write(host, b"%.6f\n" % time.monotonic())
        _compute(_SCHEDULING_S)
        while done.count.value < steps and time.monotonic() < until:
            done.wait(_LONGEST_WAIT_S)
    _await(model)
    _say("engine", {"steps": steps})


def _model(asked_path: str, done_path: str, until: float) -> None:
    for _ in range(_TICKING):
        threading.Thread(target=_tick, daemon=True).start()
    asked, done = FutexEvent(asked_path, create=False), FutexEvent(done_path, create=False)
    steps = 0
    while time.monotonic() < until:
        if asked.count.value == steps:
            asked.wait(_LONGEST_WAIT_S)
            continue
        steps += 1
        _compute(_STEP_S)
        done.notify()


def _host(reading: int, until: float) -> None:
    late: list[float] = []
    with os.fdopen(reading, "rb") as steps:
        for said in steps:
            if not late or time.monotonic() < until:
                late.append(time.monotonic() - float(said))
            _compute(_AT_HOST_S)
    _say("host", _summary(late))


def _client(until: float) -> None:
    os.setsid()
    late: list[float] = []
    while (began := time.monotonic()) < until or not late:
        time.sleep(_CLIENT_EVERY_S)
        _compute(_AT_CLIENT_S)
        late.append(time.monotonic() - began - _CLIENT_EVERY_S - _AT_CLIENT_S)
    _say("client", _summary(late))


def _tick() -> NoReturn:
    while True:
        time.sleep(_TICKS_S)


def _compute(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def _summary(late_s: Sequence[float]) -> dict[str, float]:
    return {name: quantile(late_s, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0))}


def _say(who: str, figures: Mapping[str, float]) -> None:
    # In one piece, as others write there, too.
    os.write(sys.stdout.fileno(), json.dumps({"who": who, **figures}).encode() + b"\n")


def _fork(live: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        live()
    except BaseException:  # noqa: BLE001
        # The boundary of a process, which has nobody above that would tell.
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _await(*pids: int) -> None:
    for pid in pids:
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
            sys.exit("a process of the model has failed")


if __name__ == "__main__":
    main(next(layout for layout in get_args(Layout) if layout == sys.argv[1]), float(sys.argv[2]))
