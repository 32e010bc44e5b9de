"""Guarded tasks: one that fails is noticed, and all end when told to."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dynamo_local.tasks import TaskGuard, finish_in_thread


async def fail() -> None:
    raise ValueError("the task failed")


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_failure_is_told_whether_waited_for_before_or_after() -> None:
    tasks = TaskGuard()
    early = asyncio.create_task(tasks.failed())
    tasks.spawn("failing", fail())
    with pytest.raises(ValueError, match="the task failed"):
        await early
    with pytest.raises(ValueError, match="the task failed"):
        await tasks.failed()


async def test_who_stops_waiting_does_not_lose_the_failure() -> None:
    tasks = TaskGuard()
    waiting = asyncio.create_task(tasks.failed())
    await asyncio.sleep(0)
    waiting.cancel()
    tasks.spawn("failing", fail())
    with pytest.raises(ValueError, match="the task failed"):
        await tasks.failed()


async def test_the_first_failure_is_told_at_once_to_all_who_want_to_know() -> None:
    tasks = TaskGuard()
    told: list[BaseException] = []
    for _ in range(2):
        tasks.on_failure(told.append)
    for _ in range(2):
        tasks.spawn("failing", fail())
    for _ in range(3):
        await asyncio.sleep(0)
    assert [str(error) for error in told] == ["the task failed"] * 2


async def test_a_task_that_returns_or_is_cancelled_is_no_failure() -> None:
    tasks = TaskGuard()
    failed = asyncio.create_task(tasks.failed())
    await tasks.spawn("short", asyncio.sleep(0))
    cancelled = tasks.spawn("cancelled", wait_for_ever())
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert not failed.done()
    failed.cancel()


async def test_closing_ends_every_task_and_names_those_that_resist() -> None:
    tasks, released = TaskGuard(), asyncio.Event()

    async def resist() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    obedient = tasks.spawn("obedient", wait_for_ever())
    stubborn = tasks.spawn("stubborn", resist())
    await asyncio.sleep(0)
    assert await tasks.close(deadline_s=0.01) == ["stubborn"]
    assert obedient.cancelled()
    released.set()
    await stubborn
    assert await tasks.close() == []


async def test_a_task_may_close_its_own_guard() -> None:
    tasks = TaskGuard()
    assert await tasks.spawn("closing", tasks.close()) == []


async def test_work_in_a_thread_is_finished_before_its_task_is_cancelled() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()
        done.set()
        raise ValueError("an error that concerns nobody any more")

    working = asyncio.create_task(finish_in_thread(work))
    await asyncio.to_thread(begun.wait)
    working.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not working.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert done.is_set()
