"""Engines that pull from each other, in one time, each stepped by a worker of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import PinQuestion
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.work import RequestEpoch, TokenDelta
from dynamo_local.core.ports import PulledPrefix, Step
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.mocker.tokens import continuation

from .driving import deltas_of, work
from .virtual_time import SharedTime

SETTINGS = MockerSettings(
    mocker_kv_blocks=16,
    mocker_block_size=4,
    mocker_step_base_ms=10.0,
    mocker_prefill_us_per_token=1000.0,
    mocker_decode_us_per_seq=0.0,
    mocker_transfer_base_ms=100.0,
    mocker_transfer_us_per_block=10_000.0,
)
PROMPT = list(range(18))
"""Four full blocks and two tokens."""


class Party:
    """An engine, its steps as they come, and what a worker would ask of it."""

    def __init__(self, engine: MockerEngine, time: SharedTime) -> None:
        self.engine = engine
        self.time = time
        self.steps: list[Step] = []
        self._pins = 0

    async def pump(self) -> None:
        while True:
            self.steps.append(await self.engine.step())

    async def run(self, request_id: str, token_ids: Sequence[int] = PROMPT, **how: Any) -> list[int]:
        """A whole request. Returns its tokens."""
        await self.submit(request_id, token_ids, **how)
        await self.time.until(lambda: self.finished(request_id))
        return self.tokens(request_id)

    async def submit(
        self, request_id: str, token_ids: Sequence[int] = PROMPT, *, pulled: PulledPrefix | None = None, **how: Any
    ) -> None:
        await self.engine.submit(work(request_id, token_ids, **how), pulled)

    async def cancel(self, request_id: str) -> None:
        await self.engine.cancel([RequestEpoch(request_id, 1)])

    async def ask(
        self, source: Party, token_ids: Sequence[int] = PROMPT, *, seconds: float = 10.0, pin: str | None = None
    ) -> PulledPrefix:
        """Ask a source to pin a prompt's blocks for this engine."""
        prefix = self.engine.prefix(token_ids, None, None)
        assert prefix is not None
        self._pins += 1
        question = PinQuestion(pin or f"pin {self._pins}", prefix.fingerprint, prefix.hashes, seconds)
        return PulledPrefix(question.pin, question.hashes, await source.engine.pin(question))

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas(request_id) for token in delta.token_ids]

    def deltas(self, request_id: str) -> list[TokenDelta]:
        return deltas_of(self.steps, request_id)

    def cached(self, request_id: str) -> int | None:
        return self.deltas(request_id)[0].cached_tokens

    def finished(self, request_id: str) -> bool:
        deltas = self.deltas(request_id)
        return bool(deltas) and deltas[-1].finish is not None

    @property
    def load(self) -> Load:
        load = self.steps[-1].load
        assert load is not None
        return load

    @property
    def kept(self) -> int:
        """Blocks that only readers and holds keep, as last told."""
        assert self.load.kv_pinned is not None
        return round(self.load.kv_pinned * self.engine._settings.mocker_kv_blocks)

    @property
    def idle(self) -> bool:
        return self.load == Load(running=0, waiting=0, kv_usage=0.0, kv_pinned=0.0)


def right(token_ids: Sequence[int] = PROMPT, count: int = 4) -> list[int]:
    return continuation(token_ids, count, SETTINGS.mocker_vocab_size)


@asynccontextmanager
async def parties(time: SharedTime, directory: Path, *settings: MockerSettings) -> AsyncIterator[list[Party]]:
    """Started and stepped, in a directory that must be empty again afterwards."""
    found = [Party(MockerEngine(one, directory, clock=time.clock, sleep=time.sleep), time) for one in settings]
    pumps = []
    for party in found:
        await party.engine.start(lambda _: None)
        pumps.append(asyncio.create_task(party.pump()))
    try:
        yield found
    finally:
        for party, pump in zip(found, pumps, strict=True):
            await party.engine.close(1.0)
            with suppress(EngineError):
                await pump
    assert _entries(directory) == []


def _entries(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def larger(**changes: Any) -> MockerSettings:
    return replace(SETTINGS, **{f"mocker_{name}": value for name, value in changes.items()})
