"""From a request to its first token, for an endpoint that is asleep or parked, against a start of vLLM's own server.

The request is sent to the endpoint as it is found: held while a worker starts, or wakes. The start of our server is
not counted, that of a worker is. vLLM's own server is started for its request, which is sent once it answers. All take
turns.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.endpoints import long_parked
from benchmarks.endpoints.mockers import until
from benchmarks.harness.load import client_of
from benchmarks.harness.models import LARGE, RANDOM, model_folder
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import Server, ServerError, engine_settings, running, start_endpoints, start_vllm
from benchmarks.harness.spread import median, quantile

SUMMARY = "from a request to its first token at an endpoint that is asleep or parked, against a start of vLLM"
NAME = "chat"
MODELS = (RANDOM, LARGE)
ASLEEP, PARKED = "asleep", "parked"
_TOKENS = 8
_PROMPT = "the river and the stone"


class Woken(msgspec.Struct, frozen=True):
    """A request that woke an endpoint. `state`: of the endpoint before. `again_s`: time to first token of the next
    request."""

    side: str
    state: str
    model: str
    ttft_s: float
    again_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--rounds", type=int, help="wakes of each kind (20)")
    parser.add_argument(
        "--parked-for",
        nargs="*",
        type=float,
        default=(10.0,),
        metavar="S",
        help="how long to watch it parked (10)",
    )
    parser.add_argument("--starts", type=int, help="starts of vLLM's own server (3)")
    parser.add_argument(
        "--arg", action="append", default=[], metavar="KEY=VALUE", help="a setting of the endpoint, on our side"
    )


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds if arguments.rounds is not None else (2 if arguments.quick else 20)
    starts = arguments.starts if arguments.starts is not None else (1 if arguments.quick else 3)
    args = {key: value for key, _, value in (given.partition("=") for given in arguments.arg)}
    woken: list[Woken] = []
    parked: list[long_parked.Parked] = []
    for model in arguments.models:
        async with _served(model, args) as server:
            for number in range(max(rounds, starts)):
                if number < starts:
                    woken.append(await _start_vllm(model))
                if number < rounds:
                    woken += [await _wake(server, model, state) for state in (ASLEEP, PARKED)]
                progress(", ".join(f"{one.state} {one.ttft_s:.3f} s" for one in woken[-3:]))
            parked += [await _stay(server, model, parked_s) for parked_s in arguments.parked_for]
    _show(woken, parked)
    return {"woken": [msgspec.to_builtins(one) for one in woken], "parked": [msgspec.to_builtins(p) for p in parked]}


@contextlib.asynccontextmanager
async def _served(model: str, args: Mapping[str, Any]) -> AsyncIterator[Server]:
    """A server of ours with the endpoint, which sleeps when it is told to."""
    folder = str(model_folder(model))
    spec = {
        "name": NAME,
        "model": folder,
        "args": {**engine_settings(folder), **args},
        "min_workers": 0,
        "max_workers": 1,
        "park_after_s": 3600,
        "sleep_after_s": 86400,
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_endpoints(Path(scratch), [spec])
        async with running(server):
            await server.ready()
            await until(server, ASLEEP, "ready")
            server.model = NAME
            # What only the first start does.
            await _ask(server)
            yield server


async def _wake(server: Server, model: str, state: str) -> Woken:
    if state == PARKED:
        await _park(server)
    else:
        await server.dynamo("scale", f"{NAME}=0")
        await until(server, ASLEEP)
    first = await _ask(server)
    return Woken("ours", state, model, first, await _ask(server))


async def _start_vllm(model: str) -> Woken:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        began = time.monotonic()
        server = start_vllm(Path(scratch), str(model_folder(model)))
        async with running(server):
            await server.ready()
            ready_s = time.monotonic() - began
            return Woken("vLLM", "not running", model, ready_s + await _ask(server), await _ask(server))


async def _stay(server: Server, model: str, parked_s: float) -> long_parked.Parked:
    return await long_parked.stay(server, model, parked_s, partial(_park, server), partial(_ask, server))


async def _park(server: Server) -> None:
    await server.dynamo("endpoint", "park", NAME)
    await until(server, PARKED)


async def _ask(server: Server) -> float:
    """Seconds from sending a request to its first token."""
    async with client_of(server, temperature=0) as client:
        answer = await client.complete(_PROMPT, _TOKENS)
    if answer.failure or not answer.chunks_s or answer.sent_s is None:
        raise ServerError(f"{server.name} did not answer: {answer.failure}")
    return answer.chunks_s[0] - answer.sent_s


def _show(woken: Sequence[Woken], parked: Sequence[long_parked.Parked]) -> None:
    rows = []
    for key in dict.fromkeys((one.model, one.side, one.state) for one in woken):
        mine = [one for one in woken if (one.model, one.side, one.state) == key]
        first, again = [one.ttft_s for one in mine], [one.again_s for one in mine]
        rows.append(
            [*key, str(len(mine)), f"{median(first):.3f}", f"{quantile(first, 0.99):.3f}", f"{median(again):.3f}"]
        )
    headers = ("model", "side", "state", "times", "first token, s", "p99", "next request")
    table("From a request to its first token", headers, rows)
    long_parked.show(parked)
