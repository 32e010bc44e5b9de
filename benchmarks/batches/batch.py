"""What a batch costs the people beside it, and how much of the room that they leave it uses.

People come at random moments (Poisson), so that for a part of the time nobody is there. Turns with their requests alone
and turns with a batch of 5,000 lines beside the same requests alternate; a turn with the batch alone tells how fast it
is when all room is its own. Room is time with no request of people under way. Real are `dynamo serve` with frontend,
router, NATS and worker processes; the engines are mockers, slow enough that two cores do not become the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.generated import client_of, generator_of
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import (
    NAMESPACE,
    Server,
    ServerError,
    add_override,
    parse_overrides,
    running,
    start_ours,
)
from benchmarks.harness.spread import quantile
from dynamo_local.core.stored.batches import order_of
from dynamo_local.load.figures import Record
from dynamo_local.load.workload import Gamma, Lengthwise, Uniform, drawn
from state.paths import StatePaths
from state.stored.batches import BatchStore, new_batch_id
from state.stored.files import FileDescription, FileStore

SUMMARY = "a batch of 5,000 lines beside people: their TTFT and ITL, and the room that it uses"

LINES, LINE_TOKENS = 5000, 40
WORKERS = 2
SHAPE = Lengthwise(Uniform(50, 200), Uniform(20, 60))
_RATE = 0.4
_SECONDS, _QUICK_SECONDS = 40.0, 10.0
_ROUNDS = 2
_SETTLE_S = 2.0
_ENDS_WITHIN_S = 60.0
_MOCKER = {
    "engine": "mocker",
    "mocker-step-base-ms": 40,
    "mocker-decode-us-per-seq": 200,
    "mocker-prefill-us-per-token": 50,
    "mocker-max-num-seqs": 16,
    "mocker-kv-blocks": 1024,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help=f"turns with and without the batch ({_ROUNDS})")
    parser.add_argument("--seconds", type=float, help=f"length of a turn ({_SECONDS:g})")
    parser.add_argument("--rate", type=float, default=_RATE, help="requests/s of people")
    parser.add_argument("--seed", type=int, default=1)
    add_override(parser)


@dataclass(frozen=True)
class Turn:
    """A turn. `lines` that the batch has finished in its `seconds`."""

    records: tuple[Record, ...]
    lines: int
    seconds: float

    @property
    def room_s(self) -> float:
        """Seconds without a request of people."""
        free, until = 0.0, 0.0
        spans = sorted((each.sent_s, each.ended_s) for each in self.records if each.sent_s is not None and each.ended_s)
        for sent, ended in (*spans, (self.seconds, self.seconds)):
            free += max(0.0, min(sent, self.seconds) - until)
            until = max(until, ended)
        return free


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else _ROUNDS)
    seconds = arguments.seconds or (_QUICK_SECONDS if arguments.quick else _SECONDS)
    alone: list[Turn] = []
    beside: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = _start(Path(scratch), parse_overrides(arguments.override))
        async with running(server):
            await server.ready()
            progress("ready")
            batch = await _turn(server, 0.0, seconds / 2, arguments.seed, with_batch=True)
            for number in range(rounds):
                # ABBA: whatever drifts favours neither side.
                for with_batch in (False, True) if number % 2 == 0 else (True, False):
                    turn = await _turn(server, arguments.rate, seconds, arguments.seed + number, with_batch=with_batch)
                    (beside if with_batch else alone).append(turn)
                    progress(f"{len(turn.records)} requests, {turn.lines} lines, {turn.room_s:.1f} s of room")
    return _report(batch, alone, beside)


def _start(folder: Path, more: dict[str, str]) -> Server:
    settings: dict[str, Any] = {
        "cpu-slots": WORKERS,
        **{f"VllmWorker.{key}": value for key, value in _MOCKER.items()},
        "VllmWorker.ServiceArgs.workers": WORKERS,
    }
    return start_ours(folder, str(model_folder(RANDOM)), "agg_router", settings | more)


async def _turn(server: Server, rate: float, seconds: float, seed: int, *, with_batch: bool) -> Turn:
    """The requests that the seed draws, each at its time, beside a batch or without one."""
    async with _batch(server, with_batch=with_batch) as done, client_of(server) as client:
        await asyncio.sleep(_SETTLE_S)
        generator = generator_of(client, seed)
        before, begin = done(), time.monotonic()
        async with asyncio.TaskGroup() as group:
            if rate:
                group.create_task(generator.open_loop(drawn(Gamma(rate), SHAPE, seconds, seed)))
            await asyncio.sleep(seconds)
            lines, took_s = done() - before, time.monotonic() - begin
        return Turn(tuple(generator.records), lines, took_s)


@asynccontextmanager
async def _batch(server: Server, *, with_batch: bool) -> AsyncIterator[Any]:
    """Run a batch while the context lasts. Gives what counts its finished lines."""
    if not with_batch:
        yield lambda: 0
        return
    assert server.state_root is not None
    paths = StatePaths(server.state_root, NAMESPACE)
    files = FileStore(paths)
    store = BatchStore(paths, files)
    batch_id = await asyncio.to_thread(_order, store, files, server.model)
    output = paths.batches_dir / batch_id / "output.jsonl"
    await _until(store, batch_id, "in_progress")
    yield lambda: output.read_bytes().count(b"\n") if output.exists() else 0
    store.cancel(None, batch_id, time.time())
    await _until(store, batch_id, "cancelled")


async def _until(store: BatchStore, batch_id: str, status: str) -> None:
    """Wait until the batch is so. Raises ServerError if it ends otherwise."""
    async with asyncio.timeout(_ENDS_WITHIN_S):
        while (state := store.find(None, batch_id).state).status != status:
            if state.has_ended:
                raise ServerError(f"the batch has ended as {state.status}")
            await asyncio.sleep(0.1)


def _order(store: BatchStore, files: FileStore, model: str) -> str:
    now = time.time()
    new = files.begin("")
    for number in range(LINES):
        body = {"model": model, "prompt": f"line {number}", "max_tokens": LINE_TOKENS, "ignore_eos": True}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        new.write(json.dumps(line).encode() + b"\n")
    file = files.keep(new, FileDescription("", "bench.jsonl", "batch", 3600), now)
    asked = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return store.create(order_of(json.dumps(asked).encode(), new_batch_id(), "", now), file).order.id


def _report(batch: Turn, alone: Sequence[Turn], beside: Sequence[Turn]) -> Figures:
    rate = batch.lines / batch.seconds
    room_s = sum(turn.room_s for turn in beside)
    used = sum(turn.lines for turn in beside) / (rate * room_s) if rate and room_s else None
    figures: Figures = {"lines_per_s_alone": rate, "room_s": room_s, "room_used": used, "people": {}}
    rows = []
    for name, turns in (("alone", alone), ("beside the batch", beside)):
        records = [record for turn in turns for record in turn.records]
        told = _latencies(records)
        figures["people"][name] = told | {"requests": len(records), "failed": sum(each.is_failed for each in records)}
        rows.append((name, str(len(records)), *(milliseconds(value) for value in told.values())))
    first, second = (figures["people"][name] for name in ("alone", "beside the batch"))
    ratios = {key: second[key] / first[key] for key in _latencies([])}
    figures["ratios"] = ratios
    rows.append(("ratio", "", *(f"{value:.2f}" for value in ratios.values())))
    table("People, ms", ("", "requests", *ratios), rows)
    share = sum(turn.room_s for turn in beside) / sum(turn.seconds for turn in beside)
    cells = (f"{rate:.1f}", f"{share:.0%}", "-" if used is None else f"{used:.0%}")
    table("The batch", ("lines/s alone", "room, of the time", "used of it"), [cells])
    return figures


def _latencies(records: Sequence[Record]) -> dict[str, float]:
    ttfts = [each.ttft_s for each in records if each.ttft_s is not None] or [float("nan")]
    gaps = [after - before for each in records for before, after in itertools.pairwise(each.chunks_s)] or [float("nan")]
    return {
        "TTFT p50": quantile(ttfts, 0.5),
        "TTFT p99": quantile(ttfts, 0.99),
        "ITL p50": quantile(gaps, 0.5),
        "ITL p99": quantile(gaps, 0.99),
    }
