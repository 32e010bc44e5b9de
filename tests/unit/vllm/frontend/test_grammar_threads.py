"""Threads for native code that nobody can cancel: who waits is answered in time, and others get their turn."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest

from dynamo_local.engine.vllm.frontend.grammar_threads import (
    MOST_LATE,
    GrammarThreads,
    GrammarThreadsBusyError,
    GrammarTimeoutError,
)

PATIENCE_S = 60.0
TIMEOUT_S = 0.05


class Endless:
    """Computes until the test lets it end, as native code would: without Python's lock."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.may_end = threading.Event()
        self.ended = threading.Semaphore(0)

    def __call__(self, name: str) -> str:
        self.threads.append(threading.get_native_id())
        while not self.may_end.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000)
        self.ended.release()
        return name


@pytest.fixture
def endless() -> Iterator[Endless]:
    endless = Endless()
    yield endless
    endless.may_end.set()


def test_a_call_is_answered_with_what_it_returns_or_raises() -> None:
    threads = GrammarThreads(2, PATIENCE_S)

    def fails() -> None:
        raise ValueError("no grammar")

    done = [threads.submit(pow, 2, number) for number in range(20)]
    failed = threads.submit(fails)
    assert [future.result(PATIENCE_S) for future in done] == [2**number for number in range(20)]
    with pytest.raises(ValueError, match="no grammar"):
        failed.result(PATIENCE_S)


def test_who_waits_for_what_does_not_end_is_told_so_and_its_place_is_anothers(endless: Endless) -> None:
    late: list[str] = []
    threads = GrammarThreads(1, TIMEOUT_S, late=late.append)
    slow, other = threads.submit(endless, "slow"), threads.submit(str.upper, "other")
    with pytest.raises(GrammarTimeoutError, match=r"longer than 0\.05 s"):
        slow.result(PATIENCE_S)
    assert late == ["slow"]
    assert other.result(PATIENCE_S) == "OTHER"


def test_what_goes_on_beyond_its_time_leaves_the_cores_to_others(endless: Endless) -> None:
    threads = GrammarThreads(1, TIMEOUT_S)
    with pytest.raises(GrammarTimeoutError):
        threads.submit(endless, "slow").result(PATIENCE_S)
    (thread,) = endless.threads
    assert os.sched_getscheduler(thread) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_waiting_is_not_computing() -> None:
    """Compute as on a machine that has other things to do."""
    begun, may_end = threading.Event(), threading.Event()

    def sleeps() -> str:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        return "done"

    # More than a busy machine takes to wake a thread; and then longer than it may compute.
    timeout_s = 10 * TIMEOUT_S
    future = GrammarThreads(1, timeout_s).submit(sleeps)
    assert begun.wait(PATIENCE_S)
    assert not threading.Event().wait(2 * timeout_s)
    may_end.set()
    assert future.result(PATIENCE_S) == "done"


def test_few_go_on_beyond_their_time(endless: Endless) -> None:
    threads = GrammarThreads(MOST_LATE, TIMEOUT_S)
    for future in [threads.submit(endless, f"{number}") for number in range(MOST_LATE)]:
        with pytest.raises(GrammarTimeoutError):
            future.result(PATIENCE_S)
    with pytest.raises(GrammarThreadsBusyError):
        threads.submit(endless, "one more").result(PATIENCE_S)
    endless.may_end.set()
    for _ in range(MOST_LATE):
        assert endless.ended.acquire(timeout=PATIENCE_S)

    def taken() -> bool:
        return threads.submit(pow, 2, 2).exception(PATIENCE_S) is None

    eventually(taken)


def test_what_has_not_begun_is_dropped_at_the_end(endless: Endless) -> None:
    threads = GrammarThreads(1, PATIENCE_S)
    threads.submit(endless, "running")
    waiting = threads.submit(endless, "waiting")
    threads.shutdown(wait=True)
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_S)


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came true")
