"""CPU that the frontend takes to count what a request uses and to write its record, in process.

A request of 64 tokens, as a stream, through the gate's meter and the journal; and the same without them. Both take
turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Figures, table
from benchmarks.harness.spread import bootstrap
from components.frontend.http.models import ModelEntry
from components.frontend.http.usage import FrontendUsage
from dynamo_local.core.http.asgi import Event, Scope, Send
from dynamo_local.core.usage.records import Tally
from dynamo_local.core.usage.totals import report
from state.paths import StatePaths
from state.usage.totals import read_usage

SUMMARY = "CPU that counting and recording the use of a request takes, in process"

_TOKENS = 64
_PROMPT = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=1000)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = 2 if arguments.quick else arguments.rounds
    spent: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        paths = StatePaths(Path(scratch), "bench")
        usage = FrontendUsage(paths, "lease")
        entry = ModelEntry(["m"], lambda: None)

        async def metered(scope: Scope) -> None:
            with usage.meter.of(scope, entry, "m") as found:
                await _answer(found.sending(_nowhere), found.tally)

        async def plain(scope: Scope) -> None:
            await _answer(_nowhere, None)

        for _ in range(rounds):
            for name, serve in (("without", plain), ("with", metered)):
                spent[name].append(await _us_each(serve, arguments.requests))
        usage.close()
        counted = report(read_usage(paths)).total
    asked = rounds * arguments.requests
    exact = (counted.requests, counted.prompt, counted.output) == (asked, asked * _PROMPT, asked * _TOKENS)
    more = [with_ - without for with_, without in zip(spent["with"], spent["without"], strict=True)]
    rows = [
        [f"counting {_TOKENS} tokens, and a record", bootstrap(more).shown()],
        [f"{asked} requests are counted exactly", "yes" if exact else "no"],
    ]
    table("CPU of a request", ["", "us"], rows)
    return {"requests": arguments.requests, "tokens": _TOKENS, "us_each": spent, "more_us": more, "exact": exact}


async def _answer(send: Send, tally: Tally | None) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if tally is not None:
        tally.begin()
    for number in range(_TOKENS):
        if tally is not None:
            tally.add("only", _PROMPT, 0, 1)
            if number == _TOKENS - 1:
                tally.end()
        await send({"type": "http.response.body", "body": b"data", "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _nowhere(event: Event) -> None:
    return


async def _us_each(serve: Callable[[Scope], Coroutine[Any, Any, None]], requests: int) -> float:
    begin = time.process_time()
    for _ in range(requests):
        await serve({"type": "http", "path": "/v1/completions"})
    return (time.process_time() - begin) / requests * 1e6
