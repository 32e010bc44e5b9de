"""Frontends that are missed, and those that come back."""

from __future__ import annotations

import asyncio

from components.workers.requests.sender import FrontendLiveness
from dynamo_local.tasks import TaskGuard

GRACE_S = 0.01
DEADLINE_S = 60.0


async def test_who_comes_back_keeps_its_requests_and_has_all_its_grace_again() -> None:
    tasks = TaskGuard()
    forgotten: asyncio.Queue[str] = asyncio.Queue()
    brief, endless = FrontendLiveness(tasks, GRACE_S, forgotten.put), FrontendLiveness(tasks, 3600.0, forgotten.put)
    endless.lost("missed twice")
    endless.heard("missed twice")
    brief.lost("back")
    brief.heard("back")
    # Missed later, so it would be forgotten later than those before.
    brief.lost("gone")
    endless.lost("missed twice")
    assert await asyncio.wait_for(forgotten.get(), DEADLINE_S) == "gone"
    assert forgotten.empty()
    brief.heard("gone")
    brief.heard("never missed")
    assert await tasks.close() == []


async def test_what_has_begun_to_be_forgotten_is_forgotten_to_the_end() -> None:
    tasks = TaskGuard()
    begun, may_end, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def forget(_: str) -> None:
        begun.set()
        await may_end.wait()
        done.set()

    liveness = FrontendLiveness(tasks, 0.0, forget)
    liveness.lost("f1")
    await asyncio.wait_for(begun.wait(), DEADLINE_S)
    liveness.heard("f1")
    may_end.set()
    await asyncio.wait_for(done.wait(), DEADLINE_S)
    await tasks.close()
