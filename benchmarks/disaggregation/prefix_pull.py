"""What prefix pull moves per second, and what the connector costs an engine that neither pulls nor is pulled from.

Real engines, as workers start them, in this process's hands: two that pull from one another, on a core each, and two
without the connector on the first one's core. For the cost of a decode step those on that core take turns, and whoever
has not its turn is stopped (SIGSTOP), so that not even its sleeping threads are in the way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.disaggregation import connector_cost
from benchmarks.harness.calm import Patience
from benchmarks.harness.engines import BenchEngine, Request
from benchmarks.harness.models import MODELS, RANDOM, model_folder
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import ServerError
from benchmarks.harness.spread import Interval, bootstrap, median
from dynamo_local.core.messages.kv import PinQuestion
from dynamo_local.core.ports import PulledPrefix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUMMARY = "bandwidth of a prefix pull against a memory copy, and what the connector costs a decode step"
_SIZES = (256, 512, 1024, 2048, 4096, 8000)
_STREAMS = (1, 8, 32)
_BLOCK = 32
_MAX_MODEL_LEN = 8192
_PULL_ROUNDS, _DECODE_ROUNDS = 7, 10
_PATIENCE_S = 30.0
_PIN_S = 30.0
_BESIDE_TOKENS, _BESIDE_S = 120, 0.3
"""Of each stream beside a pull, and the time that they have to get going."""
_FLOAT32_BYTES = 4
_PAGE_BYTES = 4096
_COPY_BYTES = 1 << 28
"""Buffers of this size are walked through, so that a copy comes from memory rather than from a cache."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default=RANDOM)
    parser.add_argument("--rounds", type=int, help=f"pulls of each size ({_PULL_ROUNDS})")
    parser.add_argument("--decode-rounds", type=int, help=f"turns of each engine ({_DECODE_ROUNDS})")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(_SIZES), help="tokens pulled")
    parser.add_argument("--streams", type=int, nargs="+", default=list(_STREAMS), help="streams that decode at once")
    parser.add_argument("--beside", type=int, default=0, help="streams that the reader decodes while it pulls")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    folder = model_folder(arguments.model)
    pull_rounds = arguments.rounds or (2 if arguments.quick else _PULL_ROUNDS)
    decode_rounds = arguments.decode_rounds or (2 if arguments.quick else _DECODE_ROUNDS)
    patience = Patience(0 if arguments.quick else _PATIENCE_S)
    config = {"max-model-len": _MAX_MODEL_LEN, "block-size": _BLOCK}
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        progress("starting four engines")

        async def start(name: str, core: int, *, kv_transfer: bool) -> BenchEngine:
            engine = BenchEngine(name, scratch, str(folder), core, kv_transfer=kv_transfer, **config)
            return await stack.enter_async_context(engine)

        off, control = await start("off", 0, kv_transfer=False), await start("control", 0, kv_transfer=False)
        source, reader = await start("on", 0, kv_transfer=True), await start("reader", 1, kv_transfer=True)
        reader.pause()
        turns = connector_cost.Engines(off, control, source)
        decodes = await connector_cost.rounds_of(turns, arguments.streams, decode_rounds, patience)
        for engine in (source, reader):
            engine.wake()
        copier = _Copier(_bytes_per_token(folder))
        pulls = await _pulls(source, reader, arguments.sizes, pull_rounds, patience, copier, arguments.beside)
    return {"decode_step": connector_cost.report(decodes), "pulls": _report(pulls, copier)}


def _bytes_per_token(folder: Path) -> int:
    """Of keys and values, in all layers."""
    config = json.loads((folder / "config.json").read_text())
    numbers = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return int(numbers) * _FLOAT32_BYTES


@dataclass(frozen=True)
class Pulling:
    """A prompt's times: computed by the source, continued by the reader from pulled blocks, then from its own cache."""

    tokens: int
    asked_s: float
    """What is missing, and having it pinned."""
    computed_s: float
    pulled_s: float
    cached_s: float
    """Times to the first token."""
    copied_s: float
    """A memory copy of as many bytes."""
    longer_s: float | None
    """By how much the longest step of a stream beside the pull was longer than the median of the others."""

    @property
    def took_s(self) -> float:
        """What pulling adds to a request whose prefix is there already."""
        return self.pulled_s - self.cached_s


async def _pulls(
    source: BenchEngine,
    reader: BenchEngine,
    sizes: Sequence[int],
    rounds: int,
    patience: Patience,
    copier: _Copier,
    beside: int,
) -> dict[int, list[Pulling]]:
    draw = random.Random(0)
    await _pull(source, reader, min(sizes), draw, copier, 0)  # the first one makes the connection
    found: dict[int, list[Pulling]] = {size: [] for size in sizes}
    for number in range(rounds):
        await patience.wait((*source.processes, *reader.processes))
        for size in sizes if number % 2 else reversed(sizes):
            found[size].append(await _pull(source, reader, size, draw, copier, beside))
        last = ", ".join(milliseconds(found[size][-1].took_s) for size in sizes)
        progress(f"pulls, round {number + 1}: {last} ms")
    return found


async def _pull(
    source: BenchEngine, reader: BenchEngine, size: int, draw: random.Random, copier: _Copier, beside: int
) -> Pulling:
    # One token more than is pulled: the last one is computed in any case, to sample the next.
    prompt = [draw.randrange(256) for _ in range(size + 1)]
    computed = await source.run(prompt, 1)
    streams = [asyncio.create_task(reader.run([number] * _BLOCK, _BESIDE_TOKENS)) for number in range(beside)]
    if streams:
        await asyncio.sleep(_BESIDE_S)
    begin = time.monotonic()
    prefix = reader.engine.prefix(prompt, None, None)
    if prefix is None:
        raise ServerError("the reader pulls nothing")
    question = PinQuestion(f"{draw.getrandbits(64):x}", prefix.fingerprint, prefix.hashes, _PIN_S)
    answer, _ = await asyncio.gather(source.engine.pin(question), reader.engine.cached(prefix))
    asked_s = time.monotonic() - begin
    begun_at = time.monotonic()
    pulled = await reader.run(prompt, 1, PulledPrefix(question.pin, prefix.hashes, answer))
    ended_at = time.monotonic()
    longer_s = _longer(await asyncio.gather(*streams), begun_at, ended_at) if streams else None
    await source.engine.unpin([question.pin])
    _check(pulled, size, "pulled")
    cached = await reader.run(prompt, 1)
    _check(cached, size, "cached")
    copied_s = copier.copy(size)
    return Pulling(size, asked_s, computed.ttft_s, pulled.ttft_s, cached.ttft_s, copied_s, longer_s)


def _longer(streams: Sequence[Request], begin: float, end: float) -> float:
    steps = list(itertools.pairwise(streams[0].times))
    if not begin < steps[-1][1]:
        raise ServerError("the streams beside a pull had ended before it")
    meanwhile = [later - earlier for earlier, later in steps if later > begin and earlier < end]
    others = [later - earlier for earlier, later in steps if later <= begin or earlier >= end]
    return max(meanwhile) - median(others)


def _check(request: Request, tokens: int, what: str) -> None:
    if request.cached_tokens != tokens // _BLOCK * _BLOCK:
        raise ServerError(f"{request.cached_tokens} of {tokens} tokens were {what}")


class _Copier:
    """Copies memory that was not touched lately."""

    def __init__(self, bytes_per_token: int) -> None:
        import numpy as np

        self._bytes_per_token = bytes_per_token
        self._source: NDArray[np.uint8] = np.ones(_COPY_BYTES, np.uint8)
        self._target: NDArray[np.uint8] = np.ones(_COPY_BYTES, np.uint8)
        self._at = 0

    def bytes_of(self, tokens: int) -> int:
        """Of their KV, in whole blocks."""
        return tokens // _BLOCK * _BLOCK * self._bytes_per_token

    def copy(self, tokens: int) -> float:
        """Seconds for a copy of as many bytes as the KV of so many tokens has."""
        size = self.bytes_of(tokens)
        if self._at + size > _COPY_BYTES:
            self._at = 0
        part = slice(self._at, self._at + size)
        self._at += size
        # The kernel may have taken pages away that were not used for a while. One byte of each brings it back.
        self._target[part][::_PAGE_BYTES] = self._source[part][::_PAGE_BYTES]
        begin = time.monotonic()
        self._target[part] = self._source[part]
        return time.monotonic() - begin


_HEADERS = (
    "tokens",
    "MB",
    "pull ms [95 %]",
    "GB/s",
    "memory copy ms",
    "GB/s",
    "pull / copy",
    "asking and pinning ms",
    "first token ms: pulled",
    "cached",
    "computed",
    "longest step beside, ms more",
)


def _report(pulls: dict[int, list[Pulling]], copier: _Copier) -> Figures:
    results = {size: _summary(copier.bytes_of(size), each) for size, each in pulls.items()}
    table("Prefix pull", _HEADERS, [_row(size, result) for size, result in results.items()])
    small, large = results[min(results)], results[max(results)]
    figures: Figures = {"sizes": {str(size): result for size, result in results.items()}}
    more_s = large["pull_s"]["estimate"] - small["pull_s"]["estimate"]
    if more_s > 0:
        figures["marginal_bytes_per_s"] = (large["bytes"] - small["bytes"]) / more_s
        print(f"from the smallest to the largest: {figures['marginal_bytes_per_s'] / 1e9:.2f} GB/s")
    return figures


def _summary(size: int, each: Sequence[Pulling]) -> Figures:
    pull, copied_s = bootstrap([pulling.took_s for pulling in each]), median([pulling.copied_s for pulling in each])
    longer = [pulling.longer_s for pulling in each if pulling.longer_s is not None]
    return {
        "bytes": size,
        "pull_s": vars(pull),
        "copy_s": copied_s,
        "ratio": pull.estimate / copied_s,
        "asked_s": median([pulling.asked_s for pulling in each]),
        "ttft_s": {
            "pulled": median([pulling.pulled_s for pulling in each]),
            "cached": median([pulling.cached_s for pulling in each]),
            "computed": median([pulling.computed_s for pulling in each]),
        },
        "longer_s": median(longer) if longer else None,
        "rounds": len(each),
    }


def _row(tokens: int, result: Figures) -> list[str]:
    pull = Interval(**{name: 1e3 * value for name, value in result["pull_s"].items()})
    return [
        str(tokens),
        f"{result['bytes'] / 1e6:.1f}",
        pull.shown(2),
        f"{result['bytes'] / pull.estimate / 1e6:.2f}",
        milliseconds(result["copy_s"], 2),
        f"{result['bytes'] / result['copy_s'] / 1e9:.2f}",
        f"{result['ratio']:.1f}",
        milliseconds(result["asked_s"]),
        *(milliseconds(result["ttft_s"][name]) for name in ("pulled", "cached", "computed")),
        "" if result["longer_s"] is None else milliseconds(result["longer_s"]),
    ]
