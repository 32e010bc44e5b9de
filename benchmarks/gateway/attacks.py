"""`python -m benchmarks.gateway.attacks NAME HOST PORT MODEL`: attack until standard input ends, then tell the answers.

A process of its own, so that what an attack costs its client is not taken for what it costs the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from dynamo_local.load.connection import Connections, ExchangeError

_ANSWER_WITHIN_S = 60.0


@dataclass(frozen=True)
class Target:
    """The server, and the name of its model."""

    host: str
    port: int
    model: str


@dataclass(frozen=True)
class Attack:
    """So many clients that do the same again and again. `send` does it once, and says what it was answered."""

    clients: int
    send: Callable[[Target], Awaitable[str]]


async def _post(target: Target, path: str, fields: Mapping[str, object]) -> str:
    """What it was answered, in a word."""
    return await _exchange(target, _request(path, json.dumps({"model": target.model, **fields}).encode()))


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _exchange(target: Target, request: bytes) -> str:
    connections = Connections(target.host, target.port, None)
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            return str((await connections.exchange(request, _ignore)).status)
    except TimeoutError:
        return "nothing"
    except ExchangeError:
        return "cut off"


def _ignore(part: bytes, now: float) -> None:
    """Of an answer that is streamed, nobody reads the body."""


@cache
def _text(path: str, words: int) -> bytes:
    return _request(path, json.dumps({"prompt": "word " * words}).encode())


@cache
def _many_choices(model: str) -> bytes:
    choices = [f"choice number {number}" for number in range(50_000)]
    fields = {"model": model, "prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": choices}}
    return _request("/v1/completions", json.dumps(fields).encode())


async def _tokenize(target: Target) -> str:
    return await _exchange(target, _text("/tokenize", 1_400_000))


async def _tokenize_within(target: Target) -> str:
    """As much as is let through."""
    return await _exchange(target, _text("/tokenize", 200_000))


async def _choices(target: Target) -> str:
    return await _exchange(target, _many_choices(target.model))


async def _choices_within(target: Target) -> str:
    choices = [f"{time.monotonic()} {number}" for number in range(1000)]
    fields = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": choices}}
    return await _post(target, "/v1/completions", fields)


async def _bad_tokens(target: Target) -> str:
    return await _post(target, "/v1/completions", {"prompt": [1, 10**8], "stream": True})


async def _long_id(target: Target) -> str:
    fields = {"prompt": "x", "max_tokens": 1, "request_id": "x" * 2_000_000}
    return await _post(target, "/v1/completions", fields)


async def _slow_headers(target: Target) -> str:
    return await _dripping(target, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n")


async def _slow_body(target: Target) -> str:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return await _dripping(target, head + b"Content-Length: 100000\r\n\r\n", b" ")


async def _dripping(target: Target, head: bytes, drop: bytes) -> str:
    """A little now and then, for as long as the server takes it."""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(target.host, target.port)
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


async def attack(name: str, target: Target) -> Counter[str]:
    """Until standard input ends. Returns how often each answer came."""
    answers: Counter[str] = Counter()

    async def client() -> None:
        while True:
            answers[await ATTACKS[name].send(target)] += 1

    clients = [asyncio.create_task(client()) for _ in range(ATTACKS[name].clients)]
    print("attacking", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return answers


if __name__ == "__main__":
    # Who attacks from elsewhere takes no core from the server.
    os.nice(19)
    _, _name, _host, _port, _model = sys.argv
    print(json.dumps(asyncio.run(attack(_name, Target(_host, int(_port), _model)))))
