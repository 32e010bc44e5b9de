"""What a new user waits for: the commands, the first sign of progress, the first token, one more worker.

Each command is timed beside an empty Python, in turns, since the interpreter's own start is part of all. The server is
watched as a user sees it: by the lines that it prints.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openai

from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import ROOT, ServerError
from benchmarks.harness.spread import bootstrap, median

SUMMARY = "seconds of the commands, and until a new user sees progress, a first token and a second worker"

_DYNAMO = (sys.executable, "-m", "dynamo_local.cli.main")
_EMPTY = (sys.executable, "-c", "pass")
_READY = re.compile(r"API ready at (\S+)")
_WITHIN_S = 600.0
_ENDS_WITHIN_S = 60.0
_CONFIG_OF_NOBODY = '{"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="turns of each command (15)")
    parser.add_argument("--serve", default="quickstart", metavar="MODEL", help="what is served [quickstart]")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (3 if arguments.quick else 15)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        environ = _environ(folder / "state")
        server = await _Watched.start(arguments.serve, environ)
        try:
            started = await _first_hour(server, environ)
            progress(", ".join(f"{name} {seconds:.1f} s" for name, seconds in started.items()))
            commands = _commands(folder)
            took_s = {name: list[float]() for name in commands}
            for number, (name, argv) in itertools.product(range(rounds), commands.items()):
                took_s[name].append(_timed(argv, environ))
                if name == "an empty Python":
                    progress(f"round {number + 1}")
        finally:
            await server.stop(environ)
    return _report(took_s, started)


def _environ(state: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_LOCAL_STATE", "NATS_"))}
    return {**inherited, "DYN_LOCAL_STATE_DIR": str(state), "PYTHONPATH": str(ROOT), "DYN_PARENT_PID": str(os.getpid())}


def _commands(folder: Path) -> Mapping[str, Sequence[str]]:
    unknown = folder / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text(_CONFIG_OF_NOBODY)
    return {
        "an empty Python": _EMPTY,
        "dynamo --help": (*_DYNAMO, "--help"),
        "dynamo ps": (*_DYNAMO, "ps"),
        "serve a folder that is missing": (*_DYNAMO, "serve", str(folder / "missing"), "--port", "0"),
        "serve a model that vLLM does not know": (*_DYNAMO, "serve", str(unknown), "--port", "0"),
    }


def _timed(argv: Sequence[str], environ: Mapping[str, str]) -> float:
    begin = time.monotonic()
    subprocess.run(argv, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_WITHIN_S)
    return time.monotonic() - begin


@dataclass
class _Watched:
    """`dynamo serve`, and when it printed something."""

    process: asyncio.subprocess.Process
    started_at: float
    signs_at: list[float] = field(default_factory=list)
    url: str = ""

    @classmethod
    async def start(cls, model: str, environ: Mapping[str, str]) -> _Watched:
        started_at = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(*_DYNAMO, "serve", model, "--port", "0"),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return cls(process, started_at)

    async def ready(self) -> float:
        """Read what the server prints until it is ready. Returns the seconds since its start."""
        output = self.process.stdout
        assert output is not None
        printed = ""
        async with asyncio.timeout(_WITHIN_S):
            while not self.url and (line := (await output.readline()).decode(errors="replace")):
                self.signs_at.append(time.monotonic())
                printed += line
                if found := _READY.search(line):
                    self.url = found[1]
        if not self.url:
            raise ServerError(f"dynamo serve ended before it was ready:\n{printed}")
        return self.signs_at[-1] - self.started_at

    async def drained(self) -> None:
        """Read and drop what the server prints later, so that it never waits for a reader."""
        assert self.process.stdout is not None
        while await self.process.stdout.readline():
            pass

    async def stop(self, environ: Mapping[str, str]) -> None:
        if self.process.returncode is not None:
            return
        await asyncio.to_thread(_timed, (*_DYNAMO, "stop"), environ)
        async with asyncio.timeout(_ENDS_WITHIN_S):
            await self.process.wait()


async def _first_hour(server: _Watched, environ: Mapping[str, str]) -> dict[str, float]:
    ready_s = await server.ready()
    reading = asyncio.create_task(server.drained(), name="read what the server prints")
    try:
        answered_at = await _first_token(server.url)
        scaling = time.monotonic()
        await asyncio.to_thread(_timed, (*_DYNAMO, "scale", "VllmWorker=2"), environ)
        worker_s = time.monotonic() - scaling
    finally:
        reading.cancel()
    signs = [server.started_at, *server.signs_at]
    return {
        "first sign of progress": signs[1] - server.started_at,
        "longest silence": max(later - earlier for earlier, later in itertools.pairwise(signs)),
        "ready": ready_s,
        "first token": answered_at - server.started_at,
        "one more worker": worker_s,
    }


async def _first_token(url: str) -> float:
    """Ask as the README does. Returns the time at which the first token came."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "What is the capital of France?"}], stream=True
        )
        async with stream:
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    return time.monotonic()
    raise ServerError("the first answer was empty")


def _report(took_s: Mapping[str, Sequence[float]], started: Mapping[str, float]) -> Figures:
    empty = took_s["an empty Python"]
    rows = []
    for name, times in took_s.items():
        ratio = bootstrap([mine / other for mine, other in zip(times, empty, strict=True)])
        rows.append([name, f"{median(times):.3f}", ratio.shown(1)])
    table("Commands", ("command", "seconds (median)", "times an empty Python [95 %]"), rows)
    table("A new user's first minutes", ("until", "seconds"), [[name, f"{s:.1f}"] for name, s in started.items()])
    return {"commands_s": {name: list(times) for name, times in took_s.items()}, "first_hour_s": dict(started)}
