"""What separate prefill workers do for the decodes: streams that decode while long prompts arrive, on two devices.

One side has two workers that do everything, with the best chunk size (tokens computed in a step) that was found in
first turns: of those with which long prompts wait for their first token no more than half as long again as with the one
that is best for them, the one with which the slowest percent of the decodes' gaps is shortest. The other side has a
decode worker and a prefill worker. They take turns with the same requests.

Latencies are those of the client, and beside them those with which the tokens left the engines: on a machine that has
no more cores than devices, all processes between the two want the engines' cores as well.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.disaggregation.mixed_load import EngineTimes, Traffic, Turn, mixed_load
from benchmarks.harness.accounting import CLIENT, add
from benchmarks.harness.calm import Patience
from benchmarks.harness.models import HEAVY, RANDOM, model_folder
from benchmarks.harness.presences import PresenceLog
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import Server, add_override, parse_overrides, running, start_ours
from benchmarks.harness.spread import bootstrap, median
from dynamo_local.load.workload import Lengthwise, Uniform

SUMMARY = "decodes beside long prompts: separate prefill workers against workers that do both, on the same devices"
TOGETHER, APART = "together", "apart"
_PATIENCE_S = 20.0
_MAX_MODEL_LEN = 4096
_MAX_NUM_SEQS = 16
"""More than are ever under way. vLLM takes no chunk size below it."""
_WAIT_BOUND = 1.5
"""See above: "half as long again"."""
_SHARES = (0.5, 0.99)


@dataclass(frozen=True)
class Plan:
    """What is measured: traffic such that prefill takes a good part of one device's time, and that all but one in a
    hundred of the decodes' gaps have nothing to do with the streams' own, short prompts."""

    traffic: Traffic
    chunks: tuple[int, ...]
    rounds: int
    turn_s: float
    trial_s: float
    """Length of the turn with which a chunk size is tried."""


_PLANS = {
    RANDOM: Plan(
        Traffic(8, Lengthwise(Uniform(16, 32), Uniform(1000, 2000)), 3800, 3.0), (32, 64, 128, 256), 4, 18, 12
    ),
    HEAVY: Plan(Traffic(4, Lengthwise(Uniform(8, 16), Uniform(400, 800)), 800, 8.0), (16, 32, 64, 128), 3, 24, 16),
}
_QUICK_TURN_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(_PLANS), default=RANDOM)
    parser.add_argument("--rounds", type=int, help="turns of each side; 0: try chunk sizes only")
    parser.add_argument("--seconds", type=float, help="length of a turn")
    parser.add_argument("--chunks", type=int, nargs="+", help="chunk sizes tried without prefill workers")
    parser.add_argument("--streams", type=int, help="streams that decode all the time")
    parser.add_argument("--long", type=int, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, help="seconds between two long prompts")
    add_override(parser)


def _plan(arguments: argparse.Namespace) -> Plan:
    """That of the model, as the command line changes it."""
    usual = _PLANS[arguments.model]
    traffic = usual.traffic
    rounds, seconds = (1, _QUICK_TURN_S) if arguments.quick else (usual.rounds, None)
    return Plan(
        Traffic(
            arguments.streams or traffic.streams,
            traffic.stream_shape,
            arguments.long or traffic.long_tokens,
            arguments.every or traffic.every_s,
        ),
        tuple(arguments.chunks or usual.chunks),
        rounds if arguments.rounds is None else arguments.rounds,
        arguments.seconds or seconds or usual.turn_s,
        arguments.seconds or seconds or usual.trial_s,
    )


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    plan = _plan(arguments)
    folder = str(model_folder(arguments.model))
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        chunk, found = await _best_chunk(Path(scratch), folder, plan)
        if not plan.rounds:
            return found
        # Nothing moves between these workers, so they are spared what it costs.
        chunked = {"VllmWorker.max-num-batched-tokens": chunk, "VllmWorker.kv-transfer": False}
        together = _start(Path(scratch, "agg"), folder, "agg_router", chunked)
        apart = _start(Path(scratch, "disagg"), folder, "disagg", parse_overrides(arguments.override))
        async with running(together, apart):
            progress("waiting for both servers")
            await asyncio.gather(together.ready(), apart.ready())
            patience = Patience(0 if arguments.quick else _PATIENCE_S)
            turns = await _turns({TOGETHER: together, APART: apart}, plan, patience)
    return found | _report(turns, chunk)


async def _turns(servers: Mapping[str, Server], plan: Plan, patience: Patience) -> dict[str, list[Turn]]:
    """The sides take turns, round by round."""
    turns: dict[str, list[Turn]] = {name: [] for name in servers}
    times = {name: EngineTimes() for name in servers}
    async with AsyncExitStack() as stack:
        for name, server in servers.items():
            await times[name].follow(await stack.enter_async_context(PresenceLog(server)))
            await mixed_load(server, plan.traffic, 2 * plan.traffic.every_s, -1, times[name])
        for number in range(plan.rounds):
            await patience.wait(process for server in servers.values() for process in server.processes)
            # ABBA: whatever drifts favours neither side.
            for name in sorted(servers, reverse=bool(number % 2)):
                turn = await mixed_load(servers[name], plan.traffic, plan.turn_s, number, times[name])
                turns[name].append(turn)
                progress(f"round {number + 1}, {name}: {_told(turn)}")
    return turns


async def _best_chunk(scratch: Path, folder: str, plan: Plan) -> tuple[int, Figures]:
    """The best chunk size, and the figures of all."""
    tried: dict[int, Turn] = {}
    if len(plan.chunks) == 1:
        return plan.chunks[0], {"chunk": plan.chunks[0]}
    for chunk in plan.chunks:
        overrides = {"VllmWorker.max-num-batched-tokens": chunk}
        server = _start(scratch / f"chunk-{chunk}", folder, "agg_router", overrides)
        times = EngineTimes()
        async with running(server):
            await server.ready()
            async with PresenceLog(server) as log:
                await times.follow(log)
                await mixed_load(server, plan.traffic, plan.traffic.every_s, -1, times)
                tried[chunk] = await mixed_load(server, plan.traffic, plan.trial_s, chunk, times)
        progress(f"chunks of {chunk} tokens: {_told(tried[chunk])}")
    rows = [_row(str(size), [turn]) for size, turn in tried.items()]
    table("Aggregated, by chunk size", _HEADERS, rows)
    best = best_chunk(tried)
    progress(f"best for the decodes, within {_WAIT_BOUND:g} times the shortest TTFT of long prompts: {best}")
    return best, {"chunk": best, "chunks": {str(size): _figures(turn) for size, turn in tried.items()}}


def best_chunk(tried: Mapping[int, Turn]) -> int:
    """By the rule above."""
    waits_s = {chunk: median(turn.ttfts_s) for chunk, turn in tried.items()}
    allowed = [chunk for chunk, wait_s in waits_s.items() if wait_s <= _WAIT_BOUND * min(waits_s.values())]
    return min(allowed, key=lambda chunk: tried[chunk].gap_s(0.99))


def _start(scratch: Path, folder: str, graph: str, overrides: Mapping[str, Any]) -> Server:
    scratch.mkdir()
    settings: dict[str, Any] = {
        "VllmWorker.max-model-len": _MAX_MODEL_LEN,
        "VllmWorker.max-num-seqs": _MAX_NUM_SEQS,
        "Frontend.max-model-len": _MAX_MODEL_LEN,
    }
    if graph == "agg_router":
        settings["VllmWorker.ServiceArgs.workers"] = 2
    else:
        settings |= {
            "PrefillWorker.dtype": "float32",
            "PrefillWorker.max-model-len": _MAX_MODEL_LEN,
            "PrefillWorker.max-num-seqs": _MAX_NUM_SEQS,
        }
    return start_ours(scratch, folder, graph, settings | dict(overrides))


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
    "at the engine: p50 ms",
    "p99 ms",
    "tokens/chunk",
    "TTFT p50 of long ones, ms",
    "tokens/s",
    "foreign cores",
    "failed",
)


def _report(turns: Mapping[str, Sequence[Turn]], chunk: int) -> Figures:
    pairs = list(zip(turns[TOGETHER], turns[APART], strict=True))
    ratios = {
        "p50": bootstrap([one.gap_s(0.5) / two.gap_s(0.5) for one, two in pairs]),
        "p99": bootstrap([one.gap_s(0.99) / two.gap_s(0.99) for one, two in pairs]),
        "TTFT": bootstrap([median(one.ttfts_s) / median(two.ttfts_s) for one, two in pairs]),
        "throughput": bootstrap([two.tokens_per_s / one.tokens_per_s for one, two in pairs]),
    }
    engine = [
        one / two for a, b in pairs if (one := a.engine_gap_s(0.99)) is not None and (two := b.engine_gap_s(0.99))
    ]
    if engine:
        ratios["p99 at the engine"] = bootstrap(engine)
    rows = [_row(f"aggregated, chunks of {chunk}", turns[TOGETHER]), _row("disaggregated", turns[APART])]
    table("Inter-token latency of the decodes", _HEADERS, rows)
    table(
        "Aggregated / disaggregated (throughput: the other way round)",
        [f"{name} [95 %]" for name in ratios],
        [[interval.shown() for interval in ratios.values()]],
    )
    _cores_table(turns)
    return {
        "ratios": {name: vars(interval) for name, interval in ratios.items()},
        "sides": {name: [_figures(turn) for turn in each] for name, each in turns.items()},
    }


def _row(name: str, turns: Sequence[Turn]) -> list[str]:
    return [
        name,
        *(milliseconds(median([turn.gap_s(share) for turn in turns])) for share in _SHARES),
        milliseconds(max(max(turn.gaps_s) for turn in turns)),
        *(milliseconds(_engine_gap_s(turns, share)) for share in _SHARES),
        f"{median([turn.tokens_per_chunk for turn in turns]):.2f}",
        milliseconds(median([median(turn.ttfts_s) for turn in turns]), 0),
        f"{median([turn.tokens_per_s for turn in turns]):.0f}",
        f"{median([turn.used.foreign_cores for turn in turns]):.2f}",
        str(sum(len(turn.failures) for turn in turns)),
    ]


def _engine_gap_s(turns: Sequence[Turn], share: float) -> float | None:
    found = [gap for turn in turns if (gap := turn.engine_gap_s(share)) is not None]
    return median(found) if found else None


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
        "engine_p50_s": turn.engine_gap_s(0.5),
        "engine_p99_s": turn.engine_gap_s(0.99),
        "longest_s": max(turn.gaps_s),
        "gaps": len(turn.gaps_s),
        "tokens_per_chunk": turn.tokens_per_chunk,
        "ttfts_s": turn.ttfts_s,
        "tokens_per_s": turn.tokens_per_s,
        "cores_used": {role: spent / turn.used.at for role, spent in turn.used.roles.items()},
        "foreign_cores": turn.used.foreign_cores,
        "failures": turn.failures,
    }
