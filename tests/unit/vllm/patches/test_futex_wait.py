from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dynamo_local.engine.vllm.patches import tuning
from dynamo_local.engine.vllm.patches.tuning import FUTEX_SYSCALLS, FutexEvent, FutexWait

_FOR_EVER_S = 600.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "event")


@pytest.fixture
def writer(path: str) -> FutexEvent:
    return FutexEvent(path, create=True)


@pytest.fixture
def reader(writer: FutexEvent, path: str) -> FutexEvent:
    return FutexEvent(path, create=False)


def asleep(wait: Callable[[], None]) -> threading.Thread:
    """A thread that the kernel has put to sleep in `wait`."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    calls = Path(f"/proc/self/task/{thread.native_id}/syscall")
    futex_wait = [str(FUTEX_SYSCALLS[platform.machine()]), "0x0"]
    deadline = time.monotonic() + 10
    while calls.read_text().split()[:3:2] != futex_wait:
        assert time.monotonic() < deadline, "it does not wait"
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


@pytest.mark.parametrize("ends", [FutexEvent.notify, FutexEvent.wake])
def test_who_waits_is_woken_up(writer: FutexEvent, reader: FutexEvent, ends: Callable[[FutexEvent], None]) -> None:
    thread = asleep(partial(reader.wait, _FOR_EVER_S))
    ends(writer)
    assert ended(thread)


def test_all_readers_are_woken_up(writer: FutexEvent, path: str) -> None:
    threads = [asleep(partial(FutexEvent(path, create=False).wait, _FOR_EVER_S)) for _ in range(3)]
    writer.notify()
    assert all(ended(thread) for thread in threads)


def test_a_notice_before_it_ends_the_next_wait_only(writer: FutexEvent, reader: FutexEvent) -> None:
    writer.notify()
    writer.notify()
    reader.wait(_FOR_EVER_S)
    thread = asleep(partial(reader.wait, _FOR_EVER_S))
    writer.notify()
    assert ended(thread)


def test_a_wait_has_an_end(reader: FutexEvent) -> None:
    reader.wait(0.001)


def test_the_count_goes_round(writer: FutexEvent, reader: FutexEvent) -> None:
    writer.count.value = 2**32 - 1
    reader.wait(_FOR_EVER_S)
    writer.notify()
    assert writer.count.value == 0
    reader.wait(_FOR_EVER_S)
    thread = asleep(partial(reader.wait, _FOR_EVER_S))
    writer.notify()
    assert ended(thread)


def test_another_process_is_notified(writer: FutexEvent, path: str) -> None:
    child = os.fork()
    if child == 0:
        FutexEvent(path, create=False).wait(_FOR_EVER_S)
        os._exit(7)
    writer.notify()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_reader_that_is_told_to_stop_wakes_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "_LONGEST_WAIT_S", _FOR_EVER_S)
    address = f"ipc://{tmp_path}/queue"
    FutexWait(is_reader=False, context=None, notify_address=address)
    with pytest.raises(FileNotFoundError):
        FutexWait(is_reader=True, context=None, notify_address=f"{address}-of-another")
    reader = FutexWait(is_reader=True, context=None, notify_address=address)
    thread = asleep(reader.wait)
    reader.cancel()
    assert ended(thread)
