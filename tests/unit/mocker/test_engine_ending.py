"""Cancelled requests, cancelled calls, closed engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.core.ports import Step
from dynamo_local.engine.mocker.tokens import continuation

from .driving import PROMPT, SETTINGS, deltas_of, engine_in, steps_until_finished, work
from .virtual_time import StoppedTime, VirtualTime


class TestCancel:
    async def test_frees_blocks_at_once_and_says_so_when_idle(self) -> None:
        engine = engine_in(VirtualTime())
        await engine.submit(work("running"))
        await engine.step()
        await engine.submit(work("waiting"))
        idle = asyncio.create_task(engine.step())
        await engine.cancel([RequestEpoch("running", 1), RequestEpoch("waiting", 1)])
        assert await idle == Step(1000.015, (), Load(running=0, waiting=0, kv_usage=0.0, kv_pinned=0.0))

    async def test_of_one_request_leaves_the_others(self) -> None:
        engine = engine_in(VirtualTime())
        for name in ("a", "b"):
            await engine.submit(work(name, max_tokens=2))
        await engine.step()
        await engine.cancel([RequestEpoch("a", 1)])
        (step,) = await steps_until_finished(engine)
        assert [delta.request_id for delta in step.deltas] == ["b"]
        assert step.load == Load(0, 0, 0.0, 0.0)

    async def test_is_told_of_just_once(self) -> None:
        engine = engine_in(VirtualTime())
        await engine.submit(work())
        await engine.step()
        await engine.cancel([RequestEpoch("r", 1)])
        assert (await engine.step()).load == Load(0, 0, 0.0, 0.0)
        again = asyncio.create_task(engine.step())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not again.done()
        again.cancel()

    async def test_of_unknown_requests_changes_nothing(self) -> None:
        engine = engine_in(VirtualTime())
        await engine.submit(work())
        await engine.cancel([RequestEpoch("r", 2), RequestEpoch("other", 1)])
        assert len(deltas_of(await steps_until_finished(engine))) == 4
        await engine.cancel([RequestEpoch("r", 1)])
        idle = asyncio.create_task(engine.step())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not idle.done()
        idle.cancel()

    @pytest.mark.parametrize("max_tokens", [1, 4])
    async def test_during_a_step_keeps_its_token_back(self, max_tokens: int) -> None:
        time = StoppedTime()
        engine = engine_in(time)
        await engine.submit(work("gone", max_tokens=max_tokens))
        await engine.submit(work("stays", [50, 51], max_tokens=4))
        step = asyncio.create_task(engine.step())
        await time.asleep.wait()
        await engine.cancel([RequestEpoch("gone", 1)])
        time.release()
        assert [delta.request_id for delta in (await step).deltas] == ["stays"]
        assert (await step).load == Load(1, 0, 1 / 16, 0.0)

    async def test_and_submitted_anew_starts_from_its_position(self) -> None:
        time = StoppedTime()
        engine = engine_in(time)
        await engine.submit(work())
        step = asyncio.create_task(engine.step())
        await time.asleep.wait()
        await engine.cancel([RequestEpoch("r", 1)])
        await engine.submit(work())
        time.release()
        assert (await step).deltas == ()
        deltas = deltas_of(await steps_until_finished(engine))
        assert [delta.token_ids[0] for delta in deltas] == continuation(PROMPT, 4, 256)
        assert [delta.position for delta in deltas] == [0, 1, 2, 3]


class TestClose:
    async def test_wakes_an_idle_step(self) -> None:
        engine = engine_in(VirtualTime())
        step = asyncio.create_task(engine.step())
        await asyncio.sleep(0)
        await engine.close(1.0)
        with pytest.raises(EngineError):
            await step

    async def test_wakes_a_step_that_takes_its_time(self) -> None:
        time = StoppedTime()
        engine = engine_in(time)
        await engine.submit(work())
        step = asyncio.create_task(engine.step())
        await time.asleep.wait()
        await engine.close(1.0)
        with pytest.raises(EngineError):
            await step

    async def test_wakes_a_start(self) -> None:
        time = StoppedTime()
        engine = engine_in(time, replace(SETTINGS, mocker_start_s=60.0))
        start = asyncio.create_task(engine.start(lambda _: None))
        await time.asleep.wait()
        await engine.close(1.0)
        with pytest.raises(EngineError):
            await start

    async def test_ends_everything(self) -> None:
        engine = engine_in(VirtualTime())
        await engine.submit(work("before"))
        await engine.close(1.0)
        await engine.close(1.0)
        with pytest.raises(EngineError):
            await engine.step()
        with pytest.raises(EngineError):
            await engine.submit(work("after"))


async def test_a_cancelled_call_of_step_loses_no_token() -> None:
    time = StoppedTime()
    engine = engine_in(time)
    await engine.submit(work())
    step = asyncio.create_task(engine.step())
    await time.asleep.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    time.release()
    deltas = deltas_of(await steps_until_finished(engine))
    assert [delta.position for delta in deltas] == [0, 1, 2, 3]
