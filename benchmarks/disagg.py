"""What separate prefill workers do for the decodes: streams that decode while long prompts arrive, on two devices.

One side has two workers that do everything, with the chunk size (tokens computed in a step) that served its decodes
best in a first run; the other has a decode worker and a prefill worker. They take turns with the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accounting import CLIENT, Usage, add, usage
from benchmarks.calm import Patience
from benchmarks.models import HEAVY, MODELS, QUICKSTART, model_folder
from benchmarks.report import Figures, milliseconds, progress, table
from benchmarks.servers import Server, add_override, parse_overrides, running, start_ours
from benchmarks.spread import bootstrap, median, quantile
from dynamo_local.load.arrivals import Constant
from dynamo_local.load.endpoint import Asking, parse_url
from dynamo_local.load.figures import figures
from dynamo_local.load.generator import Generator, Limits, Writer
from dynamo_local.load.lengths import Uniform
from dynamo_local.load.prompts import Alphabet, Prompts
from dynamo_local.load.records import Record
from dynamo_local.load.workload import Lengthwise, drawn, endless

SUMMARY = "decodes beside long prompts: separate prefill workers against workers that do both, on the same devices"
TOGETHER, APART = "together", "apart"
_CHUNKS = (64, 128, 256, 512)
_LONG_ANSWER = 16
_SETTLE_S = 1.0
_PATIENCE_S = 20.0
_MAX_MODEL_LEN = 4096
_SHARES = (0.5, 0.99)
_LETTERS = range(32, 127)
"""Tokens of the quick-start tokenizer that are printable text: half a character would wait for its other half."""


@dataclass(frozen=True)
class Traffic:
    """What is asked of a model, such that prefill takes a good part of one device's time."""

    streams: int
    stream_shape: Lengthwise
    long_tokens: int
    every_s: float
    chunks: tuple[int, ...]
    """vLLM takes none below its max-num-seqs, which is 64 here."""
    rounds: int
    turn_s: float
    trial_s: float


_TRAFFIC = {
    QUICKSTART: Traffic(8, Lengthwise(Uniform(32, 64), Uniform(110, 220)), 2400, 1.5, (64, 128, 256, 512), 5, 12, 9),
    HEAVY: Traffic(4, Lengthwise(Uniform(8, 16), Uniform(30, 60)), 800, 8.0, (64, 128, 256), 3, 24, 16),
}
_QUICK_TURN_S = 5.0
_LIMITS = Limits(max_in_flight=1000, timeout_s=120.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default=QUICKSTART)
    parser.add_argument("--rounds", type=int, help="turns of each side")
    parser.add_argument("--seconds", type=float, help="length of a turn")
    parser.add_argument("--chunks", type=int, nargs="+", help="chunk sizes tried without prefill workers")
    parser.add_argument("--streams", type=int, help="streams that decode all the time")
    parser.add_argument("--long", type=int, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, help="seconds between two long prompts")
    add_override(parser)


def _traffic(arguments: argparse.Namespace) -> Traffic:
    """That of the model, as the command line changes it."""
    usual = _TRAFFIC[arguments.model]
    rounds, seconds = (1, _QUICK_TURN_S) if arguments.quick else (usual.rounds, None)
    return Traffic(
        arguments.streams or usual.streams,
        usual.stream_shape,
        arguments.long or usual.long_tokens,
        arguments.every or usual.every_s,
        tuple(arguments.chunks or usual.chunks),
        arguments.rounds or rounds,
        arguments.seconds or seconds or usual.turn_s,
        arguments.seconds or seconds or usual.trial_s,
    )


@dataclass(frozen=True)
class Turn:
    """What the clients of one turn saw."""

    decodes: tuple[Record, ...]
    longs: tuple[Record, ...]
    used: Usage
    arrivals_s: float
    """Until then long prompts arrived."""

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latency of the streams that decode: each silence between two chunks."""
        return [
            later - earlier
            for record in self.decodes
            for earlier, later in itertools.pairwise(record.chunks_s)
            if later <= self.arrivals_s
        ]

    @property
    def ttfts_s(self) -> list[float]:
        """Of the long prompts."""
        return [record.ttft_s for record in self.longs if record.ttft_s is not None]

    @property
    def tokens_per_s(self) -> float:
        """Of all answers."""
        return figures((*self.decodes, *self.longs), 0.0, 0.0).output_tokens_per_s

    @property
    def tokens_per_chunk(self) -> float:
        return figures(self.decodes, 0.0, 0.0).tokens_per_chunk or 0.0

    @property
    def failures(self) -> list[str]:
        return [f"{record.error}: {record.detail}" for record in (*self.decodes, *self.longs) if record.error]

    def gap_s(self, share: float) -> float:
        return quantile(self.gaps_s, share)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    traffic = _traffic(arguments)
    folder = str(model_folder(arguments.model))
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        chunk, tried = await _best_chunk(Path(scratch), folder, traffic)
        together = _start(Path(scratch, "agg"), folder, "agg_router", {"VllmWorker.max-num-batched-tokens": chunk})
        apart = _start(Path(scratch, "disagg"), folder, "disagg", parse_overrides(arguments.override))
        async with running(together, apart):
            progress("waiting for both servers")
            await asyncio.gather(together.ready(), apart.ready())
            patience = Patience(0 if arguments.quick else _PATIENCE_S)
            turns = await _turns({TOGETHER: together, APART: apart}, traffic, patience)
    return _report(turns, chunk, tried)


async def _turns(servers: Mapping[str, Server], traffic: Traffic, patience: Patience) -> dict[str, list[Turn]]:
    """The sides take turns, round by round."""
    for server in servers.values():
        await _turn(server, -1, 2 * traffic.every_s, traffic)
    turns: dict[str, list[Turn]] = {name: [] for name in servers}
    for number in range(traffic.rounds):
        await patience.wait(process for server in servers.values() for process in server.processes)
        # ABBA: whatever drifts favours neither side.
        for name in sorted(servers, reverse=bool(number % 2)):
            turns[name].append(await _turn(servers[name], number, traffic.turn_s, traffic))
            progress(f"round {number + 1}, {name}: {_told(turns[name][-1])}")
    return turns


async def _best_chunk(scratch: Path, folder: str, traffic: Traffic) -> tuple[int, dict[int, Turn]]:
    """The chunk size with which the slowest percent of the gaps is shortest, and what each brought."""
    tried: dict[int, Turn] = {}
    if len(traffic.chunks) == 1:
        return traffic.chunks[0], tried
    for chunk in traffic.chunks:
        overrides = {"VllmWorker.max-num-batched-tokens": chunk}
        server = _start(scratch / f"chunk-{chunk}", folder, "agg_router", overrides)
        async with running(server):
            await server.ready()
            await _turn(server, -1, traffic.every_s, traffic)
            tried[chunk] = await _turn(server, chunk, traffic.trial_s, traffic)
        progress(f"chunks of {chunk} tokens: {_told(tried[chunk])}")
    return min(tried, key=lambda chunk: tried[chunk].gap_s(0.99)), tried


def _start(scratch: Path, folder: str, graph: str, overrides: Mapping[str, Any]) -> Server:
    scratch.mkdir()
    settings: dict[str, Any] = {"VllmWorker.max-model-len": _MAX_MODEL_LEN, "Frontend.max-model-len": _MAX_MODEL_LEN}
    if graph == "agg_router":
        settings["VllmWorker.ServiceArgs.workers"] = 2
    else:
        settings |= {"PrefillWorker.dtype": "float32", "PrefillWorker.max-model-len": _MAX_MODEL_LEN}
    return start_ours(scratch, folder, graph, settings | dict(overrides))


async def _turn(server: Server, seed: int, seconds: float, traffic: Traffic) -> Turn:
    """Streams that decode from the first second to the last (closed loop), and a long prompt at steady intervals,
    whether or not the earlier ones were answered (open loop)."""
    endpoint = parse_url(f"http://{server.host}:{server.port}")
    connections = endpoint.connections()
    asking = Asking(server.model, is_chat=False, ignore_eos=True, extra={})
    long_shape = Lengthwise(Uniform(traffic.long_tokens, traffic.long_tokens), Uniform(_LONG_ANSWER, _LONG_ANSWER))

    def generator(prompts_seed: int) -> Generator:
        prompts = Prompts(Alphabet(_LETTERS, 0), prompts_seed)
        return Generator(connections, Writer(endpoint, asking, prompts), _LIMITS)

    decodes, longs = generator(2 * seed), generator(2 * seed + 1)
    before = usage(server.processes)
    try:
        await asyncio.gather(
            decodes.closed_loop(endless(traffic.stream_shape, seed), traffic.streams, seconds),
            longs.open_loop(drawn(Constant(1 / traffic.every_s), long_shape, seconds, seed)),
        )
    finally:
        connections.close()
    used = usage(server.processes).since(before)
    turn = Turn(tuple(decodes.records), tuple(longs.records), used, seconds)
    await asyncio.sleep(_SETTLE_S)
    return turn


def _told(turn: Turn) -> str:
    gaps = " / ".join(milliseconds(turn.gap_s(share)) for share in _SHARES)
    return (
        f"inter-token latency p50 / p99 {gaps} ms, TTFT of long prompts {milliseconds(median(turn.ttfts_s), 0)} ms, "
        f"{turn.tokens_per_s:.0f} tokens/s, {len(turn.failures)} failures; "
        f"others used {turn.used.foreign_cores:.2f} cores"
    )


_HEADERS = (
    "",
    "p50 ms",
    "p99 ms",
    "longest ms",
    "tokens/chunk",
    "TTFT p50 of long ones, ms",
    "tokens/s",
    "foreign cores",
    "failed",
)


def _report(turns: dict[str, list[Turn]], chunk: int, tried: dict[int, Turn]) -> Figures:
    pairs = list(zip(turns[TOGETHER], turns[APART], strict=True))
    ratios = {
        "p50": bootstrap([one.gap_s(0.5) / two.gap_s(0.5) for one, two in pairs]),
        "p99": bootstrap([one.gap_s(0.99) / two.gap_s(0.99) for one, two in pairs]),
        "ttft": bootstrap([median(one.ttfts_s) / median(two.ttfts_s) for one, two in pairs]),
        "throughput": bootstrap([two.tokens_per_s / one.tokens_per_s for one, two in pairs]),
    }
    if tried:
        table("Chunk sizes tried, one turn each", _HEADERS, [_row(str(size), [turn]) for size, turn in tried.items()])
    rows = [_row(f"aggregated, chunks of {chunk}", turns[TOGETHER]), _row("disaggregated", turns[APART])]
    table("Inter-token latency of the decodes", _HEADERS, rows)
    table(
        "Aggregated / disaggregated (throughput: the other way round)",
        ("p50 [95 %]", "p99 [95 %]", "TTFT [95 %]", "throughput [95 %]"),
        [[interval.shown() for interval in ratios.values()]],
    )
    _cores_table(turns)
    return {
        "chunk": chunk,
        "ratios": {name: vars(interval) for name, interval in ratios.items()},
        "sides": {name: [_figures(turn) for turn in each] for name, each in turns.items()},
        "chunks": {str(size): _figures(turn) for size, turn in tried.items()},
    }


def _row(name: str, turns: Sequence[Turn]) -> list[str]:
    return [
        name,
        *(milliseconds(median([turn.gap_s(share) for turn in turns])) for share in _SHARES),
        milliseconds(max(max(turn.gaps_s) for turn in turns)),
        f"{median([turn.tokens_per_chunk for turn in turns]):.2f}",
        milliseconds(median([median(turn.ttfts_s) for turn in turns]), 0),
        f"{median([turn.tokens_per_s for turn in turns]):.0f}",
        f"{median([turn.used.foreign_cores for turn in turns]):.2f}",
        str(sum(len(turn.failures) for turn in turns)),
    ]


def _cores_table(turns: Mapping[str, Sequence[Turn]]) -> None:
    """Who used the two cores."""
    used = {name: add(turn.used for turn in each) for name, each in turns.items()}
    roles = [*sorted({role for side in used.values() for role in side.roles} - {CLIENT}), CLIENT]
    rows = [[role, *(f"{side.roles.get(role, 0.0) / side.at:.2f}" for side in used.values())] for role in roles]
    table("Cores used", ("process", *used), rows)


def _figures(turn: Turn) -> Figures:
    return {
        "p50_s": turn.gap_s(0.5),
        "p99_s": turn.gap_s(0.99),
        "longest_s": max(turn.gaps_s),
        "gaps": len(turn.gaps_s),
        "tokens_per_chunk": turn.tokens_per_chunk,
        "ttfts_s": turn.ttfts_s,
        "tokens_per_s": turn.tokens_per_s,
        "cores_used": {role: spent / turn.used.at for role, spent in turn.used.roles.items()},
        "foreign_cores": turn.used.foreign_cores,
        "failures": turn.failures,
    }
