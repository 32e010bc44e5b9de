"""Kill -9 of each process of a server while an endpoint parks, is parked, sleeps or wakes.

A mocker has neither an engine's processes nor one that holds its weights: these are killed with `--engine vllm`.

A request is sent just after the kill, or just before it while the endpoint wakes. It is to be answered with the tokens
that the undisturbed server gave; the request that a killed frontend had, or a killed `dynamo serve`, is sent again once
there is another one. After each kill the endpoint is to be as its last order and its use have it, with one worker at
most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.endpoints.mockers import mocker, until
from benchmarks.faults.parts import Parts
from benchmarks.harness.client import Completion
from benchmarks.harness.load import client_of
from benchmarks.harness.report import Figures, progress, save, table
from benchmarks.harness.servers import SMALL_ENGINE, Server, ServerError, running, serve_again, start_endpoints

SUMMARY = (
    "every process of a server killed while an endpoint parks, is parked, sleeps or wakes: is it right after that?"
)
NAME = "chat"
_ENGINE_PARTS = ("engine-core", "engine-worker", "prepared")
"""Parts that a mocker does not have."""
PARTS = (
    "host",
    "launcher",
    *_ENGINE_PARTS,
    "forkserver",
    "spare",
    "frontend",
    "router",
    "planner",
    "nats",
    "circusd",
    "serve",
)
"""Parts of a server (benchmarks/faults/parts.py)."""
MOMENTS = ("parking", "parked", "asleep", "waking")
_OPTIONS = ("--cpu-slots=2",)
_CUTS_CONNECTIONS = frozenset({"frontend", "serve"})
_ARGS: Mapping[str, Any] = {**SMALL_ENGINE, "max-model-len": 2048}
_PROMPT = "the river and the stone"
_TOKENS = 16
_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.1
_PREPARED_WITHIN_S = 30.0
_WAKING_S = 0.2
"""Time after a request by which the endpoint that it wakes is waking."""


@dataclass(frozen=True)
class Killed:
    """A kill and what followed.

    `answered_s`: from the kill to the answer; None: there was none in time. `right`: the answer had the right tokens.
    `wrong`: what was wrong afterwards, empty if nothing.
    """

    moment: str
    part: str
    answered_s: float | None
    right: bool
    wrong: str

    @property
    def is_good(self) -> bool:
        return self.answered_s is not None and self.right and not self.wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, metavar="MOMENT", help=f"of {', '.join(MOMENTS)}")
    parser.add_argument("--engine", choices=("mocker", "vllm"), default="mocker", help="of the endpoint (mocker)")
    parser.add_argument("--rounds", type=int, default=1, help="kills of each part at each moment (1)")


async def run(arguments: argparse.Namespace) -> Figures:
    """Kill, print, and return the figures. They are saved after each kill."""
    is_mocker = arguments.engine == "mocker"
    there = tuple(part for part in PARTS if not (is_mocker and part in _ENGINE_PARTS))
    parts = arguments.parts or (there[:2] if arguments.quick else there)
    moments = arguments.moments or MOMENTS
    kills = [(moment, part) for _ in range(arguments.rounds) for part in parts for moment in moments]
    found: list[Killed] = []
    async for killed in killing(kills, is_mocker=is_mocker):
        found.append(killed)
        progress(f"{killed.part} while {killed.moment}: {_told(killed)}")
        save(arguments.json, "wake-kills", _figures(found))
    rows = [[killed.moment, killed.part, _told(killed)] for killed in found]
    table("Each process killed at each moment", ["moment", "killed", "afterwards"], rows)
    return _figures(found)


async def killing(kills: Sequence[tuple[str, str]], *, is_mocker: bool) -> AsyncIterator[Killed]:
    """Kill at each of these moments these parts of one server. Raises ServerError for one that is beyond that."""
    spec = mocker(NAME, min_workers=0, max_workers=1, park_after_s=3600, sleep_after_s=7200)
    if not is_mocker:
        spec |= {"engine": "vllm", "args": dict(_ARGS)}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_endpoints(Path(scratch), [spec], _OPTIONS)
        async with running(server):
            await server.ready()
            await until(server, "asleep", "ready")
            scene = _Scene(server, (await _complete(server)).token_ids)
            for moment, part in kills:
                yield await scene.kill(moment, part)


@dataclass(frozen=True)
class _Scene:
    """`right`: the answer's tokens."""

    server: Server
    right: list[int]

    async def kill(self, moment: str, part: str) -> Killed:
        """Bring the endpoint to the moment, kill, and see what follows."""
        if not self.right:
            raise ServerError(f"{NAME} did not answer:\n{self.server.last_lines()}")
        await self._come_to(moment)
        if part == "prepared":
            await self._prepared()
        asking = asyncio.create_task(self._ask()) if moment == "waking" else None
        if asking is not None:
            await asyncio.sleep(_WAKING_S)
        began = time.monotonic()
        if not self._kill(part):
            part = f"{part} (there was none)"
        if part == "serve":
            await self._serve_again()
        answer = await (asking or asyncio.create_task(self._ask()))
        while answer is None and part in _CUTS_CONNECTIONS and time.monotonic() < began + _WITHIN_S:
            await asyncio.sleep(_LOOK_EVERY_S)
            answer = await self._ask()
        answered_s = None if answer is None else time.monotonic() - began
        wrong = await self._what_is_wrong()
        self.server.refresh()
        return Killed(moment, part, answered_s, answer == self.right, wrong)

    async def _come_to(self, moment: str) -> None:
        if await self._ask() is None:
            raise ServerError(f"{NAME} does not answer before a kill:\n{self.server.last_lines()}")
        if moment in ("asleep", "waking"):
            await self._order("scale", f"{NAME}=0")
            await until(self.server, "asleep")
        else:
            await self._order("endpoint", "park", NAME)
        if moment == "parked":
            await until(self.server, "parked")

    async def _prepared(self) -> None:
        """Wait until a process holds the model's weights."""
        deadline = time.monotonic() + _PREPARED_WITHIN_S
        while "prepared" not in Parts(self.server).processes() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _order(self, *arguments: str) -> None:
        """Retried, as a command is by its user: the server may be about to notice the last kill."""
        deadline = time.monotonic() + _WITHIN_S
        while True:
            try:
                await self.server.dynamo(*arguments)
                return
            except ServerError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_LOOK_EVERY_S)

    def _kill(self, part: str) -> bool:
        found = Parts(self.server).processes().get(part, ())
        for process in found[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return bool(found)

    async def _serve_again(self) -> None:
        await serve_again(self.server, _OPTIONS)
        await self.server.ready()

    async def _ask(self) -> list[int] | None:
        """The tokens of an answer; None if it failed."""
        try:
            async with asyncio.timeout(_WITHIN_S):
                answer = await _complete(self.server)
        except TimeoutError:
            return None
        if answer.failure:
            progress(f"    {answer.failure[:200]}")
        return None if answer.failure else answer.token_ids

    async def _what_is_wrong(self) -> str:
        """What is wrong once the answer is there; empty if nothing is."""
        with contextlib.suppress(ServerError):
            await until(self.server, "ready")
        if self.server.ended:
            return "the server has ended"
        status = (await self.server.endpoints()).get(NAME, {})
        if status.get("state") != "ready" or status.get("ready") != 1:
            return f"it is {status.get('state')} with {status.get('ready', 0)} workers: {status.get('reason')}"
        return "" if await self._ask() == self.right else "the next answer is wrong"


async def _complete(server: Server) -> Completion:
    async with client_of(server, NAME, return_token_ids=True) as client:
        return await client.complete(_PROMPT, _TOKENS)


def _told(killed: Killed) -> str:
    answer = "no answer" if killed.answered_s is None else f"answered after {killed.answered_s:.1f} s"
    return f"{answer}{'' if killed.right else ', wrong tokens'}{'; ' if killed.wrong else ''}{killed.wrong}"


def _figures(found: Sequence[Killed]) -> Figures:
    return {"kills": [msgspec.to_builtins(killed) for killed in found], "good": sum(each.is_good for each in found)}
