"""What others lose to a client that means harm: a bystander's time to the first token, attacked and not, in turns.

A turn without an attack comes before and after each attack, so that what else the machine
does is in both. What an attack itself is answered with is counted: an attack that is refused is the cheapest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gateway.attacks import ATTACKS
from benchmarks.harness.client import HOST
from benchmarks.harness.load import client_of
from benchmarks.harness.models import MODELS, RANDOM, model_folder
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import ROOT, Server, add_override, parse_overrides, running, start_ours, start_vllm
from benchmarks.harness.spread import quantile

SUMMARY = "time to the first token of a bystander while another client attacks the server"
_ROUNDS = 3
_TURN_S = 6.0
_TOKENS = 4
_PAUSE_S = 0.02
"""Between two requests of the bystander."""
_SETTLE_S = 0.5
_END_WITHIN_S = 30.0

Answers = Counter[str]


@dataclass
class Side:
    """What was measured of one server, by attack."""

    attacked: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    alone: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: dict[str, Answers] = field(default_factory=lambda: defaultdict(Counter))
    failed: Counter[str] = field(default_factory=Counter)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help=f"turns of each attack ({_ROUNDS})")
    parser.add_argument("--turn", type=float, default=_TURN_S, metavar="S", help=f"length of a turn ({_TURN_S:g} s)")
    parser.add_argument("--model", choices=MODELS, default=RANDOM)
    parser.add_argument("--vllm", action="store_true", help="attack vLLM's own server as well")
    parser.add_argument("--attack", action="append", choices=ATTACKS, help="only this one; may be given again")
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else _ROUNDS)
    model = str(model_folder(arguments.model))
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for name in ("vLLM", "ours") if arguments.vllm else ("ours",):
            overrides = parse_overrides(arguments.override)
            folder = Path(scratch)
            server = start_vllm(folder, model) if name == "vLLM" else start_ours(folder, model, "agg", overrides)
            async with running(server):
                await server.ready()
                sides[name] = await _attacked(server, arguments.attack or list(ATTACKS), rounds, arguments.turn)
                progress(f"{name}: the log has {server.log.stat().st_size} bytes")
    return _report(sides)


async def _attacked(server: Server, names: list[str], rounds: int, turn_s: float) -> Side:
    side = Side()
    await _bystander(server, 1.0, Counter())
    for number in range(rounds):
        for name in names:
            alone = await _bystander(server, turn_s / 2, side.failed)
            async with _under(name, server, side.answers[name]):
                side.attacked[name] += await _bystander(server, turn_s, side.failed)
            alone += await _bystander(server, turn_s / 2, side.failed)
            side.alone[name] += alone
            told = (
                f"{milliseconds(quantile(side.attacked[name], 0.99))} ms beside {milliseconds(quantile(alone, 0.99))}"
            )
            progress(f"{server.name}, round {number + 1}, {name}: {told}")
    return side


async def _bystander(server: Server, seconds: float, failed: Counter[str]) -> list[float]:
    """Ask for a few tokens again and again. Returns the seconds to each first one."""
    found: list[float] = []
    until = time.monotonic() + seconds
    async with client_of(server) as client:
        while time.monotonic() < until:
            sent_at = time.monotonic()
            answer = await client.complete(f"hello {sent_at}", _TOKENS)
            if answer.failure:
                failed[answer.failure] += 1
            first_s = None if answer.failure else answer.ttft_s
            found.append(time.monotonic() - sent_at if first_s is None else first_s)
            await asyncio.sleep(_PAUSE_S)
    return found


@asynccontextmanager
async def _under(attack: str, server: Server, answers: Answers) -> AsyncIterator[None]:
    argv = [sys.executable, "-m", "benchmarks.gateway.attacks", attack, HOST, str(server.port), server.model]
    process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        # It has begun.
        await asyncio.sleep(_SETTLE_S)
        yield
        process.stdin.close()
        answers.update(json.loads(await asyncio.wait_for(process.stdout.read(), _END_WITHIN_S)))
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _report(sides: Mapping[str, Side]) -> Figures:
    figures: Figures = {}
    for name, side in sides.items():
        rows = []
        for attack, seconds in side.attacked.items():
            alone, attacked = quantile(side.alone[attack], 0.99), quantile(seconds, 0.99)
            answers = ", ".join(f"{answer}: {count}" for answer, count in side.answers[attack].most_common(3))
            ratio = f"{attacked / alone:.1f}"
            rows.append((attack, milliseconds(alone), milliseconds(attacked), ratio, str(len(seconds)), answers))
            figures.setdefault(name, {})[attack] = {
                "alone_s": side.alone[attack],
                "attacked_s": seconds,
                "answers": dict(side.answers[attack]),
            }
        title = f"{name}: a bystander's time to the first token, p99 in ms"
        headers = ("attack", "undisturbed", "attacked", "ratio", "requests", "answers to the attack")
        table(title, headers, rows)
        if side.failed:
            progress(f"{name}: requests of the bystander that failed: {dict(side.failed)}")
    return figures
