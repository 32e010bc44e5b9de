"""An engine in virtual time, its work, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_local.core.messages.work import Submit, TokenDelta
from dynamo_local.core.ports import Engine, Step
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings

from .virtual_time import VirtualTime

SETTINGS = MockerSettings(
    mocker_kv_blocks=16,
    mocker_block_size=4,
    mocker_step_base_ms=10.0,
    mocker_prefill_us_per_token=1000.0,
    mocker_decode_us_per_seq=2000.0,
)
PROMPT = [5, 6, 7, 8, 9]


def engine_in(time: VirtualTime, settings: MockerSettings = SETTINGS) -> MockerEngine:
    return MockerEngine(settings, model="test-model", clock=time.clock, sleep=time.sleep)


def work(
    request_id: str = "r",
    token_ids: Sequence[int] = PROMPT,
    *,
    epoch: int = 1,
    position: int = 0,
    arrival_time: float = 0.0,
    priority: int = 0,
    cache_salt: str | None = None,
    adapter: str | None = None,
    hold_s: float = 0.0,
    **sampling: Any,
) -> Submit:
    return Submit(
        request_id=request_id,
        epoch=epoch,
        frontend="f",
        token_ids=list(token_ids),
        sampling=msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 4} | sampling)),
        position=position,
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=cache_salt,
        adapter=adapter,
        hold_s=hold_s,
    )


async def steps_until_finished(engine: Engine, requests: int = 1) -> list[Step]:
    steps: list[Step] = []
    async with asyncio.timeout(60):  # only so that a lost request fails the test instead of hanging it
        while requests:
            steps.append(await engine.step())
            requests -= sum(delta.finish is not None for delta in steps[-1].deltas)
    return steps


def deltas_of(steps: list[Step], request_id: str = "r") -> list[TokenDelta]:
    return [delta for step in steps for delta in step.deltas if delta.request_id == request_id]
