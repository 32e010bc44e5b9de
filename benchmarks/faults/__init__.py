"""What each fault costs: requests lost, the longest time without a token, and the time until all is ready again.

A real `dynamo serve` with two vLLM workers and a router, and clients that always want tokens. One fault after another,
each so many times; before each all is well, and both workers have work. With another revision beside, both servers are
there, and each fault is done to both in turn; only the one whose turn it is has clients. A fault that ends a server is
noted, and a new one goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.clients import Clients, learn_answers
from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.parts import Parts
from benchmarks.faults.table import Trials, show, together
from benchmarks.faults.trial import Trial, inflict, spread
from benchmarks.harness.client import ServerError
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, compare, progress, save
from benchmarks.harness.servers import (
    BESIDE,
    OURS,
    Server,
    add_beside,
    add_override,
    in_turn,
    parse_overrides,
    sides_of,
    start_ours,
)

SUMMARY = "each process killed or stopped, the statefile damaged: requests lost, longest gap, time until all is ready"
_GRAPH = "agg_router"
_OPTIONS = ("--restart-backoff-max=0.5",)
_STREAMS = 16
_TIMES = 10

Found = dict[str, list[Figures]]
"""Trials by the names of faults, each as `Trial.as_dict` has it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, help=f"how often each fault is done ({_TIMES})")
    parser.add_argument("--only", nargs="+", choices=FAULTS, metavar="FAULT", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--streams", type=int, default=_STREAMS, help=f"clients that always want tokens ({_STREAMS})")
    add_beside(parser)
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="print the table of saved figures")
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures. They are saved after each trial."""
    if arguments.show:
        saved = [json.loads(path.read_text()) for path in arguments.show]
        return _report({side: together([each.get(key, {}) for each in saved]) for side, key in _KEYS.items()})
    found: dict[str, Found] = {name: {} for name in sides_of(arguments)}
    for names in _by_settings(arguments.only or list(FAULTS)):
        async with _sides(arguments, {**FAULTS[names[0]].settings, **parse_overrides(arguments.override)}) as sides:
            for name in names:
                for number in range(arguments.times or (1 if arguments.quick else _TIMES)):
                    for side in in_turn(sides, number):
                        trial = await _well(side, name, number)
                        found[side.name].setdefault(name, []).append(trial.as_dict())
                        progress(f"{side.name}: {name} {number + 1}: {_told(trial)}")
                        save(arguments.json, "faults", _figures(found))
    return _report(found)


def _by_settings(names: Sequence[str]) -> list[list[str]]:
    """Faults that can share a server, in their order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(str(FAULTS[name].settings), []).append(name)
    return list(groups.values())


@dataclass
class _Side:
    """A revision, and its server, if there is one."""

    name: str
    checkout: Path
    settings: Mapping[str, Any]
    streams: int
    scratch: str
    server: Server | None = None
    answers: Mapping[str, Sequence[int]] = field(default_factory=dict)

    async def trial(self, name: str, number: int) -> Trial:
        """Do the fault to a server on which all is well. Raises ServerError if it is not."""
        server = self.server or await self._start()
        parts, clients = Parts(server), Clients(server, self.answers)
        clients.open(self.streams)
        try:
            await spread(parts, self.streams)
            trial = await inflict(FAULTS[name], number, server, parts, clients)
        finally:
            await clients.close()
        server.refresh()
        if trial.note:
            await self.stop()
        return trial

    async def stop(self) -> None:
        """End the server; there is a new one for the next trial."""
        if self.server is not None:
            await self.server.stop()
        self.server = None

    async def _start(self) -> Server:
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        model = str(model_folder(RANDOM))
        self.server = start_ours(folder, model, _GRAPH, self.settings, _OPTIONS, self.checkout)
        progress(f"{self.name}: waiting for the server")
        await self.server.ready()
        if not self.answers:
            self.answers = await learn_answers(self.server, self.streams)
            progress(f"{self.name}: {len(self.answers)} of {self.streams} prompts have one answer")
        return self.server


@contextlib.asynccontextmanager
async def _sides(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> AsyncIterator[list[_Side]]:
    """The revisions to measure. However the block is left: afterwards none of their servers is there."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        checkouts = sides_of(arguments).items()
        sides = [_Side(name, checkout, settings, arguments.streams, scratch) for name, checkout in checkouts]
        try:
            yield sides
            for side in sides:
                await side.stop()
        finally:
            for side in sides:
                if side.server is not None:
                    side.server.kill()


async def _well(side: _Side, name: str, number: int) -> Trial:
    """Do the fault, on a new server if all is not well on the one that there is."""
    try:
        return await side.trial(name, number)
    except ServerError as error:
        progress(f"a new server: {error}")
        await side.stop()
        return await side.trial(name, number)


_KEYS = {OURS: "trials", BESIDE: "beside"}


def _figures(found: Mapping[str, Trials]) -> Figures:
    return {_KEYS[side]: trials for side, trials in found.items() if trials}


def _report(found: Mapping[str, Trials]) -> Figures:
    for side, trials in found.items():
        if trials:
            show(side, trials)
    if found.get(BESIDE):
        compare("fault", {"gap_s": "longest gap", "ready_s": "all ready"}, found[OURS], found[BESIDE])
    return _figures(found)


def _told(trial: Trial) -> str:
    ready = trial.note if trial.ready_s is None else f"all ready after {trial.ready_s:.1f} s"
    return (
        f"{trial.lost} of {trial.under_way} lost, {trial.refused} refused, {trial.wrong} wrong, "
        f"longest gap {trial.gap_s:.1f} s, {ready}"
    )
