"""Time to first token at two real vLLM workers, where the router has a prefix pulled, and where it is computed.

The first worker decodes some streams, which cost it more than the second one would pay for computing a prefix that the
first one has: so requests for that prefix go to the second one and pull it. Between them, in turns, come requests with
a prefix of the same length that nobody has, which the second one computes, and repetitions, which it has cached. What
the router decided is read from its account, and a request that went otherwise does not count.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.harness.client import Client, Completion
from benchmarks.harness.load import LETTERS, client_of
from benchmarks.harness.models import model_folder
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import NAMESPACE, Server, ServerError, running, start_ours
from benchmarks.harness.spread import median
from dynamo_local.control.client import ControlClient
from dynamo_local.control.descriptions import RouteLine, RoutesView
from dynamo_local.control.operations import LIST_ROUTES, SET_SETTING
from dynamo_local.model.named.names import SMOLLM2
from state.paths import StatePaths

_SIZES = (512, 768)
"""Tokens of a prefix. The router has 512 pulled at least; longer ones it would rather leave where they are."""

_PREFIXES, _QUICK_PREFIXES = 20, 8
"""Half of them at either worker, or about."""
_STREAMS, _STREAM_TOKENS, _STREAM_OUTPUT = 16, 1_024, 2_500
_BEGUN_WITHIN_S = 120.0
_OWN = 16
"""Tokens behind each prefix."""


@dataclass(frozen=True)
class Asked:
    """A request for one token: its prompt's length, and its time to first token."""

    tokens: int
    ttft_s: float


Routed = tuple[Asked, RouteLine]


async def measured(quick: bool) -> Figures:
    """Serve, print, and return the figures."""
    folder = model_folder(SMOLLM2)
    found: dict[str, list[Asked]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = _start(Path(scratch), folder)
        async with running(server):
            await server.ready()
            progress("ready")
            async with client_of(server) as client:
                bench = _Bench(server, client)
                for size in _SIZES[:1] if quick else _SIZES:
                    found |= await bench.rounds(size, _QUICK_PREFIXES if quick else _PREFIXES)
    rows = [
        [name, str(len(asked)), milliseconds(median([each.ttft_s for each in asked]))] for name, asked in found.items()
    ]
    table("Two vLLM workers, smollm2", ("", "requests", "TTFT median, ms"), rows)
    return {name: [each.ttft_s for each in asked] for name, asked in found.items()}


def _start(folder: Path, model: Path) -> Server:
    settings = {
        "cpu-slots": 2,
        "VllmWorker.ServiceArgs.workers": 2,
        "VllmWorker.kv-transfer": True,
        "VllmWorker.dtype": "float32",
    }
    return start_ours(folder, str(model), "agg_router", settings)


@dataclass
class _Bench:
    server: Server
    client: Client

    @property
    def _paths(self) -> StatePaths:
        assert self.server.state_root is not None, "ours"
        return StatePaths(self.server.state_root, NAMESPACE)

    async def rounds(self, size: int, count: int) -> dict[str, list[Asked]]:
        """Requests of this size in turns, by what became of them."""
        await asyncio.to_thread(ControlClient(self._paths).do, SET_SETTING, {"value": 0}, key="rebalance")
        prefixes = [_tokens(f"{size} {number}", size) for number in range(count)]
        shared = _tokens(f"stream {size}", _STREAM_TOKENS)
        asked = [await self._ask(prompt) for prompt in (*(each + _tokens("first", _OWN) for each in prefixes), shared)]
        *stored, (_, last) = await self._routed(asked)
        busy = last.worker
        there = [prefix for prefix, (_, line) in zip(prefixes, stored, strict=True) if line.worker == busy]
        progress(f"{len(there)} of {count} prefixes of {size} tokens are at the worker that gets streams")
        asked = []
        async with self._streams(shared):
            for number, prefix in enumerate(there):
                both = [prefix + _tokens("second", _OWN), _tokens(f"new {size} {number}", size + _OWN)]
                for prompt in (*(both if number % 2 else reversed(both)), prefix + _tokens("third", _OWN)):
                    asked.append(await self._ask(prompt))
            progress(f"asked {len(asked)} times")
            routed = await self._routed(asked)
        found: dict[str, list[Asked]] = {f"{size} tokens, {how}": [] for how in ("pulled", "computed", "cached")}
        for each, line in routed:
            if line.worker != busy:
                how = "pulled" if line.pull_from == busy else "cached" if (line.cached or 0) >= size else "computed"
                found[f"{size} tokens, {how}"].append(each)
        return found

    async def _ask(self, prompt: Sequence[int]) -> Asked:
        completion = await self.client.complete(prompt, 1)
        if completion.failure or completion.ttft_s is None:
            raise ServerError(completion.failure)
        # What a worker has cached is told within 50 ms.
        await asyncio.sleep(0.2)
        return Asked(len(prompt), completion.ttft_s)

    async def _routed(self, asked: Sequence[Asked]) -> list[Routed]:
        """The latest requests, asked one after the other, with what the router decided."""
        query = {"limit": str(len(asked))}
        answer = await asyncio.to_thread(ControlClient(self._paths).do, LIST_ROUTES, query=query)
        view = msgspec.convert(answer, RoutesView)
        found = list(zip(asked, reversed(view.routes), strict=True))
        if any(each.tokens != line.tokens for each, line in found):
            raise ServerError("the router has assigned others meanwhile")
        return found

    @asynccontextmanager
    async def _streams(self, shared: Sequence[int]) -> AsyncIterator[None]:
        """Streams where their prompt is cached, until the end of the block."""
        streams = [Completion() for _ in range(_STREAMS)]
        tasks = [asyncio.create_task(self._stream(shared, number, each)) for number, each in enumerate(streams)]
        try:
            async with asyncio.timeout(_BEGUN_WITHIN_S):
                while not all(each.chunks_s for each in streams):  # noqa: ASYNC110  # nothing tells
                    await asyncio.sleep(0.05)
            yield
            if any(task.done() for task in tasks):
                raise ServerError("the streams ended before the measurement")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, shared: Sequence[int], number: int, completion: Completion) -> None:
        await self.client.complete([*shared, *_tokens(f"own {number}", _OWN)], _STREAM_OUTPUT, completion)


def _tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(LETTERS, k=count)
