"""Kill -9 of every process of a server with three real models, one after another, under a mixed load.

Two endpoints generate, one embeds, each on two workers. Every answer is compared with the one that the undisturbed
server gave. A killed frontend, or a killed `dynamo serve`, takes its clients' connections with it: those requests fail,
and none may be answered wrongly. After each kill all endpoints must be ready again; after that of `dynamo serve` a new
one must serve the same endpoints. With another revision beside, both servers are there, and take turns with each part;
only the one whose turn it is has clients.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.clients import give_up
from benchmarks.faults.parts import Parts, all_ready
from benchmarks.harness.client import Completion, ExchangeError, ServerError
from benchmarks.harness.load import client_of
from benchmarks.harness.models import OTHER, RANDOM, model_folder
from benchmarks.harness.report import Figures, compare, progress, save, table
from benchmarks.harness.servers import (
    BESIDE,
    OURS,
    SMALL_ENGINE,
    Server,
    add_beside,
    in_turn,
    running,
    serve_again,
    sides_of,
    start_endpoints,
)

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
_OPTIONS = ("--cpu-slots=8",)
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
                if any(answer.failure for answer in answers) or answers[0].token_ids != answers[1].token_ids:
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
        self._tasks = []

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
                await self._count(False, str(error))
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
        async with client_of(self.server, name, return_token_ids=True) as client:
            return await client.complete(prompt, _TOKENS)

    async def _embed(self, prompt: str) -> list[float]:
        answer = await self.server.post("/v1/embeddings", {"model": EMBED, "input": prompt})
        vector: list[float] = answer["data"][0]["embedding"]
        return vector


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=_PARTS, metavar="PART", help=f"of {', '.join(_PARTS)}")
    add_beside(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Kill, print, and return the figures. They are saved after each kill."""
    found: dict[str, list[Trial]] = {name: [] for name in sides_of(arguments)}
    parts = arguments.parts or (_PARTS[:4] if arguments.quick else _PARTS)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        servers = {
            name: start_endpoints(Path(scratch, name), specs(), _OPTIONS, checkout)
            for name, checkout in sides_of(arguments).items()
        }
        async with running(*servers.values()):
            clients = {name: Clients(server) for name, server in servers.items()}
            for each in clients.values():
                await _all_ready(each.server)
                await each.learn()
            progress(f"{_PROMPTS} prompts have one answer from each endpoint")
            for number, part in enumerate(parts):
                for name in in_turn(found, number):
                    found[name] += await _kill_each(part, clients[name])
                    save(arguments.json, "endpoint-kills", _figures(found))
    for name, trials in found.items():
        _show(name, trials)
    if BESIDE in found:
        compare("killed", {"ready_s": "all ready"}, *(_by_part(found[name]) for name in (OURS, BESIDE)))
    return _figures(found)


async def _kill_each(part: str, clients: Clients) -> list[Trial]:
    """Kill each process that is there of this part, one after another."""
    server, trials = clients.server, []
    clients.open()
    for number in range(len(Parts(server).processes().get(part, ()))):
        await asyncio.sleep(_QUIET_S)
        clients.tally = Tally()
        begun = time.monotonic()
        found = Parts(server).processes().get(part, ())
        if not found:
            break
        os.kill(found[number % len(found)].pid, signal.SIGKILL)
        if part == "serve":
            await serve_again(server, _OPTIONS)
        ready_s: float | None = None
        with contextlib.suppress(ServerError, TimeoutError):
            await _all_ready(server)
            ready_s = time.monotonic() - begun
        await asyncio.sleep(_QUIET_S)
        tally = clients.tally
        trials.append(Trial(part, tally.answered, tally.wrong, tally.failed, ready_s, tuple(sorted(tally.errors))))
        progress(f"{server.name}: {part} {number + 1}: {_told(trials[-1])}")
        server.refresh()
    await clients.close()
    return trials


async def _all_ready(server: Server) -> None:
    """Wait until every process and every endpoint is ready. Raises TimeoutError, and ServerError if the server ends."""
    parts = Parts(server)
    async with asyncio.timeout(_READY_WITHIN_S):
        while not (all_ready(await parts.rows()) and await _endpoints_answer(server)):
            if parts.ended:
                raise ServerError(f"the server ended:\n{server.last_lines()}")
            await asyncio.sleep(_AGAIN_S)


async def _endpoints_answer(server: Server) -> bool:
    """Whether each endpoint has all its workers, by `dynamo endpoint list`."""
    statuses = await server.endpoints()
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


def _figures(found: Mapping[str, Sequence[Trial]]) -> Figures:
    return {"trials" if name == OURS else name: [asdict(trial) for trial in found[name]] for name in found}


def _by_part(trials: Sequence[Trial]) -> dict[str, list[Figures]]:
    return {part: [asdict(trial) for trial in trials if trial.part == part] for part in _PARTS}


def _show(name: str, trials: Sequence[Trial]) -> None:
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
    table(f"Each process killed, {name}", ["killed", "answered", "wrong", "failed", "all ready after, s"], rows)
