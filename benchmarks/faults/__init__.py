"""What each fault costs: requests lost, the longest time without a token, and the time until all is ready again.

A real `dynamo serve` with two vLLM workers and a router, and clients that always want tokens. One fault after another,
each so many times; before each all is well, and both workers have work. The server is talked to from outside only (its
command line, HTTP, signals), so that the code of another checkout can be measured, too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.clients import Clients, learn_answers
from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.parts import Parts
from benchmarks.faults.table import show, together
from benchmarks.faults.trial import Trial, inflict, spread
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.report import Figures, progress, save
from benchmarks.harness.servers import ServerError, add_override, add_project, parse_overrides, running, start_ours

SUMMARY = "each process killed or stopped, the statefile damaged: requests lost, longest gap, time until all is ready"
_GRAPH = "agg_router"
_STREAMS = 16
_TIMES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, help=f"how often each fault is done ({_TIMES})")
    parser.add_argument("--only", nargs="+", choices=FAULTS, metavar="FAULT", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--streams", type=int, default=_STREAMS, help=f"clients that always want tokens ({_STREAMS})")
    add_project(parser)
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="print the table of saved figures")
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures. They are saved after each trial."""
    if arguments.show:
        trials = together([json.loads(path.read_text())["trials"] for path in arguments.show])
        show(trials)
        return {"trials": trials}
    found: dict[str, list[Figures]] = {}
    times = arguments.times or (1 if arguments.quick else _TIMES)
    for names in _by_settings(arguments.only or list(FAULTS)):
        work = [(name, number) for name in names for number in range(times)]
        settings = {**FAULTS[names[0]].settings, **parse_overrides(arguments.override)}
        answers: Mapping[str, Sequence[int]] = {}
        while work:
            answers = await _on_one_server(arguments, settings, answers, work, found)
    show(found)
    return {"trials": found}


def _by_settings(names: Sequence[str]) -> list[list[str]]:
    """Faults that can share a server, in their order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(str(FAULTS[name].settings), []).append(name)
    return list(groups.values())


async def _on_one_server(
    arguments: argparse.Namespace,
    settings: Mapping[str, Any],
    answers: Mapping[str, Sequence[int]],
    work: list[tuple[str, int]],
    found: dict[str, list[Figures]],
) -> Mapping[str, Sequence[int]]:
    """Take faults off the work until there is none, or until one has ended the server. Returns the right answers."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_ours(
            Path(scratch),
            str(model_folder(RANDOM)),
            _GRAPH,
            settings,
            ("--restart-backoff-max=0.5",),
            arguments.project,
        )
        async with running(server):
            progress("waiting for the server")
            await server.ready()
            if not answers:
                answers = await learn_answers(server, arguments.streams)
                progress(f"{len(answers)} of {arguments.streams} prompts have one answer")
            parts, clients = Parts(server, arguments.project), Clients(server, answers)
            clients.open(arguments.streams)
            try:
                await spread(parts, arguments.streams)
                while work and await _is_well(parts, arguments.streams):
                    name, number = work.pop(0)
                    clients.forget()
                    trial = await inflict(FAULTS[name], number, server, parts, clients)
                    server.refresh()
                    found.setdefault(name, []).append(trial.as_dict())
                    progress(f"{name} {number + 1}: {_told(trial)}")
                    save(arguments.json, "faults", {"trials": found})
                    if trial.note:
                        break
            finally:
                await clients.close()
    return answers


async def _is_well(parts: Parts, streams: int) -> bool:
    """Whether another fault may be done to the server."""
    try:
        await spread(parts, streams)
    except ServerError as error:
        progress(f"a new server: {error}")
        return False
    return True


def _told(trial: Trial) -> str:
    ready = trial.note if trial.ready_s is None else f"all ready after {trial.ready_s:.1f} s"
    return (
        f"{trial.lost} of {trial.under_way} lost, {trial.refused} refused, {trial.wrong} wrong, "
        f"longest gap {trial.gap_s:.1f} s, {ready}"
    )
