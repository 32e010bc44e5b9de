"""Loops that look after requests sleep while there are none."""

from __future__ import annotations

import asyncio
from typing import Any

from components.frontend.requests.live_requests import LiveRequests

REQUEST: Any = object()


async def event_loop_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_all_who_wait_go_on_when_there_is_a_request() -> None:
    live = LiveRequests()
    waiting = [asyncio.create_task(live.pause(0)) for _ in range(3)]
    await event_loop_turns()
    assert not any(task.done() for task in waiting)
    live["a"] = REQUEST
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    await asyncio.wait_for(live.some(), 60)


async def test_a_request_that_is_over_at_once_wakes_nobody_for_nothing() -> None:
    live = LiveRequests()
    waiting = asyncio.create_task(live.some())
    await event_loop_turns()
    live["a"] = REQUEST
    del live["a"]
    await event_loop_turns()
    assert not waiting.done()
    live["b"] = REQUEST
    await asyncio.wait_for(waiting, 60)
