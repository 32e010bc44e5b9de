"""Kill -9 of every process of a server with three real models, one after another, under a mixed load.

Two endpoints generate, one embeds, each on two workers. Every answer is compared with the one that the undisturbed
server gave. A killed frontend, or a killed `dynamo serve`, takes its clients' connections with it: those requests fail,
and none may be answered wrongly. After each kill all endpoints must be ready again; after that of `dynamo serve` a new
one must serve the same endpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.faults.clients import give_up
from benchmarks.faults.parts import Parts, all_ready
from benchmarks.harness.models import OTHER, RANDOM, model_folder
from benchmarks.harness.report import Figures, progress, save, table
from benchmarks.harness.servers import ROOT, SMALL_ENGINE, Server, ServerError, running, start_endpoints
from dynamo_local.load.client import Client
from dynamo_local.load.errors import ExchangeError
from dynamo_local.load.http.endpoint import Asking, ask
from dynamo_local.load.results.records import Completion

SUMMARY = "every process of a server with three real models killed under a mixed load: are all answers right?"

GENERATE = ("chat", "story")
EMBED = "embed"
_PARTS = (
    "host",
    "launcher",
    "engine-core",
    "engine-worker",
    "router",
    "planner",
    "nats",
    "circusd",
    "forkserver",
    "frontend",
    "serve",
)
"""Parts of a server (benchmarks/faults/parts.py), in the order in which they are killed."""
_CUTS_CONNECTIONS = frozenset({"frontend", "serve"})
_PROMPTS = 6
_TOKENS = 120
_CLIENTS_EACH = 3
_AGAIN_S = 0.2
_READY_WITHIN_S = 180.0
_QUIET_S = 2.0
_LARGEST_ERROR = 1e-3
"""Of a component of an embedding: other company in a batch is computed in another order."""

_ARGS: Mapping[str, Any] = {**SMALL_ENGINE, "max-model-len": 2048}


@dataclass
class Tally:
    """What the clients saw since the last kill."""

    answered: int = 0
    wrong: int = 0
    failed: int = 0
    errors: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Trial:
    """A kill. `ready_s`: until all endpoints were ready again; None if they were not in time."""

    part: str
    answered: int
    wrong: int
    failed: int
    ready_s: float | None
    errors: tuple[str, ...]


def specs() -> list[dict[str, Any]]:
    """The three endpoints."""
    models = {"chat": RANDOM, "story": OTHER, EMBED: RANDOM}
    pooling = {"runner": "pooling", "convert": "embed"}
    return [
        {
            "name": name,
            "model": str(model_folder(model)),
            "min_workers": 2,
            "max_workers": 2,
            "args": {**_ARGS, **(pooling if name == EMBED else {})},
        }
        for name, model in models.items()
    ]


class Clients:
    """Clients of all three endpoints, which know the right answers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.tally = Tally()
        self._tokens: dict[tuple[str, str], list[int]] = {}
        self._vectors: dict[str, list[float]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self) -> None:
        """Learn the answers of the undisturbed server, each asked for twice. Raises ServerError if they differ."""
        for prompt in _prompts():
            for name in GENERATE:
                answers = [await self._complete(name, prompt) for _ in range(2)]
                if any(answer.error for answer in answers) or answers[0].token_ids != answers[1].token_ids:
                    raise ServerError(f"{name} does not answer {prompt!r} alike: {[a.failure for a in answers]}")
                self._tokens[name, prompt] = answers[0].token_ids
            self._vectors[prompt] = await self._embed(prompt)

    def open(self) -> None:
        for number in range(_CLIENTS_EACH):
            for name in GENERATE:
                self._tasks.append(asyncio.create_task(self._generate_on_and_on(name, number)))
            self._tasks.append(asyncio.create_task(self._embed_on_and_on(number)))

    async def close(self) -> None:
        await give_up(self._tasks)

    async def _generate_on_and_on(self, name: str, number: int) -> None:
        prompts = _prompts()
        while True:
            prompt = prompts[number % len(prompts)]
            number += 1
            answer = await self._complete(name, prompt)
            right = self._tokens[name, prompt]
            got = answer.token_ids
            await self._count(got != right[: len(got)] or (answer.is_completed and got != right), answer.failure)

    async def _embed_on_and_on(self, number: int) -> None:
        prompts = _prompts()
        while True:
            prompt = prompts[number % len(prompts)]
            number += 1
            try:
                vector = await self._embed(prompt)
            except ExchangeError as error:
                await self._count(False, f"{error.kind}: {error.cause}")
            else:
                await self._count(not _alike(vector, self._vectors[prompt]), "")

    async def _count(self, wrong: bool, failure: str) -> None:
        self.tally.answered += not failure
        self.tally.wrong += wrong
        if failure:
            self.tally.failed += 1
            self.tally.errors.add(failure[:160])
            await asyncio.sleep(_AGAIN_S)

    async def _complete(self, name: str, prompt: str) -> Completion:
        extra = {"return_token_ids": True}
        async with Client(self.server.endpoint, Asking(name, is_chat=False, ignore_eos=True, extra=extra)) as client:
            return await client.complete(prompt, _TOKENS)

    async def _embed(self, prompt: str) -> list[float]:
        body = msgspec.json.encode({"model": EMBED, "input": prompt})
        with contextlib.closing(self.server.endpoint.connections()) as connections:
            answer = await ask(connections, self.server.endpoint.request("POST", "/v1/embeddings", body))
        vector: list[float] = msgspec.json.decode(answer)["data"][0]["embedding"]
        return vector


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=_PARTS, metavar="PART", help=f"of {', '.join(_PARTS)}")


async def run(arguments: argparse.Namespace) -> Figures:
    """Kill, print, and return the figures. They are saved after each kill."""
    trials: list[Trial] = []
    parts = arguments.parts or (_PARTS[:4] if arguments.quick else _PARTS)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_endpoints(Path(scratch), specs(), ("--cpu-slots=8",))
        async with running(server):
            await _all_ready(server)
            clients = Clients(server)
            await clients.learn()
            progress(f"{_PROMPTS} prompts have one answer from each endpoint")
            clients.open()
            try:
                for part in parts:
                    trials += await _kill_each(part, server, clients, Path(scratch))
                    save(arguments.json, "endpoint-kills", _figures(trials))
            finally:
                await clients.close()
    _show(trials)
    return _figures(trials)


async def _kill_each(part: str, server: Server, clients: Clients, scratch: Path) -> list[Trial]:
    """Kill each process that is there of this part, one after another."""
    trials = []
    for number in range(len(Parts(server, ROOT).processes().get(part, ()))):
        await asyncio.sleep(_QUIET_S)
        clients.tally = Tally()
        begun = time.monotonic()
        found = Parts(server, ROOT).processes().get(part, ())
        if not found:
            break
        os.kill(found[number % len(found)].pid, signal.SIGKILL)
        if part == "serve":
            await _serve_again(server, scratch)
        ready_s: float | None = None
        with contextlib.suppress(ServerError, TimeoutError):
            await _all_ready(server)
            ready_s = time.monotonic() - begun
        await asyncio.sleep(_QUIET_S)
        tally = clients.tally
        trials.append(Trial(part, tally.answered, tally.wrong, tally.failed, ready_s, tuple(sorted(tally.errors))))
        progress(f"{part} {number + 1}: {_told(trials[-1])}")
        server.refresh()
    return trials


async def _serve_again(server: Server, scratch: Path) -> None:
    """Start another server once the killed one has ended, in its place. Nobody tells it of the endpoints."""
    while server.popen.poll() is None:  # noqa: ASYNC110  # a foreign process
        await asyncio.sleep(_AGAIN_S)
    server.replace_by(start_endpoints(scratch, None, ("--cpu-slots=8",), port=server.port))


async def _all_ready(server: Server) -> None:
    """Wait until every process and every endpoint is ready. Raises TimeoutError, and ServerError if the server ends."""
    parts = Parts(server, ROOT)
    async with asyncio.timeout(_READY_WITHIN_S):
        while not (all_ready(await parts.rows()) and await _endpoints_answer(server)):
            if parts.ended:
                raise ServerError(f"the server ended:\n{server.last_lines()}")
            await asyncio.sleep(_AGAIN_S)


async def _endpoints_answer(server: Server) -> bool:
    """Whether each endpoint has all its workers, by `dynamo endpoint list`."""
    listed = await server.dynamo("endpoint", "list", "--json")
    if listed is None:
        return False
    statuses = {each["spec"]["name"]: each["status"] for each in msgspec.json.decode(listed)}
    return set(statuses) == {*GENERATE, EMBED} and all(
        status["state"] == "ready" and status.get("ready", 0) == 2 for status in statuses.values()
    )


def _prompts() -> list[str]:
    return [f"prompt number {number}: the quick brown fox " for number in range(_PROMPTS)]


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and max(abs(a - b) for a, b in zip(one, other, strict=True)) < _LARGEST_ERROR


def _told(trial: Trial) -> str:
    ready = "not ready again" if trial.ready_s is None else f"all ready after {trial.ready_s:.1f} s"
    return f"{trial.answered} answered, {trial.wrong} wrong, {trial.failed} failed, {ready}"


def _figures(trials: Sequence[Trial]) -> Figures:
    return {"trials": [msgspec.to_builtins(trial) for trial in trials]}


def _show(trials: Sequence[Trial]) -> None:
    rows = [
        [
            trial.part + (" (cuts connections)" if trial.part in _CUTS_CONNECTIONS else ""),
            str(trial.answered),
            str(trial.wrong),
            str(trial.failed),
            "-" if trial.ready_s is None else f"{trial.ready_s:.1f}",
        ]
        for trial in trials
    ]
    table("Each process killed", ["killed", "answered", "wrong", "failed", "all ready after, s"], rows)
