"""Threads that check and compile grammars: native code that may take minutes and cannot be cancelled.

A call that takes longer than its deadline fails. Its thread goes on, on cores that are otherwise idle, and another
thread takes its place. The deadline counts time spent computing, so that a grammar does not fail for a busy machine.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_local.core.http.bounds.request import RequestBounds

_log = logging.getLogger(__name__)

TIMEOUT_ENV = "DYN_GRAMMAR_TIMEOUT_S"
"""Set by the server in a worker and its engine: maximum time to compile a grammar, in s."""

MOST_LATE = 4
"""Threads that go on beyond their deadline. While there are so many, no grammar is compiled."""

_NICE = 5
"""Niceness of a thread that compiles: a fourth of a core on which an engine decodes, and all of an idle one."""

_TICKS = os.sysconf("SC_CLK_TCK")
_LEAST_WAIT_S = 0.05


class GrammarTimeoutError(Exception):
    """A grammar has taken too long."""


class GrammarThreadsBusyError(Exception):
    """Too many threads are busy with grammars that have taken too long."""


@dataclass(eq=False)
class _Job:
    future: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    name: str


class GrammarThreads(Executor):
    """Runs `at_once` calls at a time, each in a thread of its own.

    `late` is called with a call's arguments before its future fails with GrammarTimeoutError.
    """

    def __init__(self, at_once: int, timeout_s: float, late: Callable[..., None] = lambda *_: None) -> None:
        self._at_once = at_once
        self._timeout_s = timeout_s
        self._tell_late = late
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._late: set[_Job] = set()
        self._names = (f"grammar-{number}" for number in itertools.count())

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if kwargs:
            raise TypeError("no keyword arguments are handed on")
        job = _Job(Future(), function, args, next(self._names))
        with self._lock:
            if len(self._late) >= MOST_LATE:
                why = f"{MOST_LATE} grammars are still being compiled that have taken too long"
                job.future.set_exception(GrammarThreadsBusyError(why))
            else:
                self._waiting.append(job)
                self._begin()
        return job.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Drop the calls that wait. Never waits itself: the threads end with their process."""
        with self._lock:
            dropped, self._waiting = self._waiting, deque()
        for job in dropped:
            job.future.cancel()

    def _begin(self) -> None:
        """Start what there is room for. The lock is held."""
        while self._waiting and len(self._running) < self._at_once:
            job = self._waiting.popleft()
            if job.future.set_running_or_notify_cancel():
                self._running.add(job)
                threading.Thread(target=self._run, args=(job,), name=job.name, daemon=True).start()

    def _run(self, job: _Job) -> None:
        yield_to_others(_NICE)
        # Threads that this one starts have its name.
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(job.name)
        timer = self._watch(job, self._timeout_s)
        try:
            result = job.function(*job.args)
        except BaseException as error:  # noqa: BLE001  # handed to the waiting caller
            self._end(job, partial(job.future.set_exception, error))
        else:
            self._end(job, partial(job.future.set_result, result))
        timer.cancel()

    def _watch(self, job: _Job, after_s: float) -> threading.Timer:
        timer = threading.Timer(after_s, self._look, (job,))
        timer.daemon = True
        timer.start()
        return timer

    def _look(self, job: _Job) -> None:
        left_s = self._timeout_s - _computed_s(job.name)
        if left_s > 0:
            if job in self._running:
                self._watch(job, max(left_s, _LEAST_WAIT_S))
            return
        with self._lock:
            if job not in self._running:
                return
            self._running.discard(job)
            self._late.add(job)
            self._begin()
        _yield_to_all(job.name)
        self._tell_late(*job.args)
        why = f"it takes longer than {self._timeout_s:g} s"
        job.future.set_exception(GrammarTimeoutError(why))
        _log.warning("a grammar has taken longer than %g s; its thread runs on idle cores only now", self._timeout_s)

    def _end(self, job: _Job, settle: Callable[[], None]) -> None:
        with self._lock:
            in_time = job in self._running
            self._running.discard(job)
            self._late.discard(job)
            self._begin()
        if in_time:
            settle()


def yield_to_others(nice: int) -> None:
    """Lower the priority of the calling thread, and of those that it starts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def timeout_of(environ: Mapping[str, str]) -> float:
    """Read the deadline that the worker was configured with, in seconds."""
    return float(environ.get(TIMEOUT_ENV, RequestBounds.grammar_timeout_s))


def _threads_named(name: str) -> list[int]:
    found = []
    for entry in Path("/proc/self/task").iterdir():
        try:
            if (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
        except OSError:
            continue  # it has just ended
    return found


def _computed_s(name: str) -> float:
    """Time that the threads of this name have spent on a core."""
    ticks = 0
    for thread in _threads_named(name):
        try:
            fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def _yield_to_all(name: str) -> None:
    """Have the threads of this name run only where a core would be idle."""
    for thread in _threads_named(name):
        try:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        except OSError as error:
            _log.warning("the thread of a grammar cannot be made to yield: %s", error)
