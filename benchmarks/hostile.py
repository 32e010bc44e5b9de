"""What others lose to a client that means harm: a bystander's time to the first token, attacked and not, in turns.

A turn without an attack comes before and after each attack, so that what else the machine
does is in both. What an attack itself is answered with is counted: an attack that is refused is the cheapest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.client import Connection
from benchmarks.models import MODELS, QUICKSTART, model_folder
from benchmarks.report import Figures, milliseconds, progress, table
from benchmarks.servers import Server, add_override, parse_overrides, running, start_ours, start_vllm
from benchmarks.spread import quantile

SUMMARY = "time to the first token of a bystander while another client attacks the server"
_ROUNDS = 3
_TURN_S = 6.0
_TOKENS = 4
_PAUSE_S = 0.02
"""Between two requests of the bystander."""
_ANSWER_WITHIN_S = 60.0

Answers = Counter[str]


@dataclass(frozen=True)
class Attack:
    """So many clients that do the same again and again. `send` does it once, and says what it was answered."""

    clients: int
    send: Callable[[Server], Awaitable[str]]


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
    parser.add_argument("--model", choices=MODELS, default=QUICKSTART)
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
            async with _under(ATTACKS[name], server, side.answers[name]):
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
    until = time.perf_counter() + seconds
    async with Connection(server.host, server.port, server.model) as connection:
        while time.perf_counter() < until:
            answer = await connection.complete(f"hello {time.perf_counter()}", _TOKENS)
            if answer.error:
                failed[answer.error] += 1
                found.append(time.perf_counter() - answer.sent_at)
            else:
                found.append(answer.ttft_s)
            await asyncio.sleep(_PAUSE_S)
    return found


@asynccontextmanager
async def _under(attack: Attack, server: Server, answers: Answers) -> AsyncIterator[None]:
    async def attacker() -> None:
        while True:
            answers[await attack.send(server)] += 1

    tasks = [asyncio.create_task(attacker()) for _ in range(attack.clients)]
    try:
        # It has begun.
        await asyncio.sleep(0.2)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _post(server: Server, path: str, fields: Mapping[str, object]) -> str:
    """What it was answered, in a word."""
    body = json.dumps({"model": server.model, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return await _exchange(server, head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)


async def _exchange(server: Server, request: bytes) -> str:
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            try:
                writer.write(request)
                await writer.drain()
                status = (await reader.readline()).split()
                await reader.read()
            finally:
                writer.close()
    except TimeoutError:
        return "nothing"
    except OSError:
        return "cut off"
    return status[1].decode() if len(status) > 1 else "cut off"


async def _tokenize(server: Server) -> str:
    return await _post(server, "/tokenize", {"prompt": "word " * 1_400_000})


async def _tokenize_within(server: Server) -> str:
    """As much as is let through."""
    return await _post(server, "/tokenize", {"prompt": "word " * 200_000})


async def _choices(server: Server) -> str:
    choices = [f"choice number {number}" for number in range(50_000)]
    return await _post(server, "/v1/completions", {"prompt": "x", "structured_outputs": {"choice": choices}})


async def _choices_within(server: Server) -> str:
    choices = [f"{time.perf_counter()} {number}" for number in range(1000)]
    fields = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": choices}}
    return await _post(server, "/v1/completions", fields)


async def _bad_tokens(server: Server) -> str:
    return await _post(server, "/v1/completions", {"prompt": [1, 10**8], "stream": True})


async def _long_id(server: Server) -> str:
    fields = {"prompt": "x", "max_tokens": 1, "request_id": "x" * 2_000_000}
    return await _post(server, "/v1/completions", fields)


async def _slow_headers(server: Server) -> str:
    return await _dripping(server, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n")


async def _slow_body(server: Server) -> str:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return await _dripping(server, head + b"Content-Length: 100000\r\n\r\n", b" ")


async def _dripping(server: Server, head: bytes, drop: bytes) -> str:
    """A little now and then, for as long as the server takes it."""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        try:
            writer.write(head)
            while not reader.at_eof():
                writer.write(drop)
                await writer.drain()
                await asyncio.sleep(0.5)
        finally:
            writer.close()
    await asyncio.sleep(0.05)
    return "cut off"


ATTACKS: Mapping[str, Attack] = {
    "tokenize 7 MB": Attack(2, _tokenize),
    "tokenize 1 MB": Attack(2, _tokenize_within),
    "50,000 choices": Attack(2, _choices),
    "1,000 choices": Attack(2, _choices_within),
    "bad token ids": Attack(8, _bad_tokens),
    "request id of 2 MB": Attack(2, _long_id),
    "400 slow headers": Attack(400, _slow_headers),
    "400 slow bodies": Attack(400, _slow_body),
}


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
