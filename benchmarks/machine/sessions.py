"""Who waits how long for a core, where engines leave none idle, by which processes share a session.

It is a model of them (session_turn.py), no vLLM: what it shows is the kernel's doing, and depends on its version.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from benchmarks.harness.calm import Patience
from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.servers import ServerError
from benchmarks.harness.spread import median
from benchmarks.machine.session_turn import Layout

SUMMARY = "who waits for a core beside engines that leave none idle, by which processes share a session (a model)"
_ROUNDS = 3
_TURN_S = 12.0
_PATIENCE_S = 30.0
_END_WITHIN_S = 30.0
_LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_SHARES = ("p50", "p99", "worst")

Turn = Sequence[Mapping[str, Any]]
"""What each process of a turn said."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help=f"turns of each case ({_ROUNDS})")
    parser.add_argument("--seconds", type=float, help=f"length of a turn ({_TURN_S:g})")


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else _ROUNDS)
    seconds = arguments.seconds or (_TURN_S / 4 if arguments.quick else _TURN_S)
    patience = Patience(0 if arguments.quick else _PATIENCE_S)
    turns: dict[Layout, list[Turn]] = {layout: [] for layout in _LAYOUTS}
    for number in range(rounds):
        for layout in _LAYOUTS if number % 2 == 0 else reversed(_LAYOUTS):
            await patience.wait()
            turns[layout].append(await _turn(layout, seconds))
            client, host = (milliseconds(_late(turns[layout][-1:], who)["worst"]) for who in ("client", "host"))
            progress(f"round {number + 1}, {layout}: a client waited {client} ms at most, a host {host}")
    return _report(turns, seconds)


async def _turn(layout: Layout, seconds: float) -> Turn:
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.machine.session_turn", layout, str(seconds), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(seconds + _END_WITHIN_S):
            said, _ = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
    if program.returncode != 0:
        raise ServerError("a turn has failed: its error is above")
    return [json.loads(line) for line in said.splitlines()]


def _late(turns: Sequence[Turn], who: str) -> dict[str, float]:
    """In seconds: medians of the processes' own, and the worst of all."""
    said = [process for turn in turns for process in turn if process["who"] == who]
    found = {share: median([process[share] for process in said]) for share in _SHARES}
    return {**found, "worst": max(process["worst"] for process in said)}


def _report(turns: Mapping[Layout, Sequence[Turn]], seconds: float) -> Figures:
    figures: Figures = {"kernel": platform.release()}
    rows: list[Sequence[str]] = []
    for layout, of_layout in turns.items():
        hosts, clients = _late(of_layout, "host"), _late(of_layout, "client")
        steps = [process["steps"] for turn in of_layout for process in turn if process["who"] == "engine"]
        figures[layout] = {"host_s": hosts, "client_s": clients, "steps_per_s": median(steps) / seconds}
        told = (milliseconds(late[share]) for late in (hosts, clients) for share in _SHARES)
        rows.append((layout, *told, f"{median(steps) / seconds:.1f}"))
    table(
        f"From when it was to be awake until it was, ms (Linux {platform.release()})",
        ("", *(f"{who} {share}" for who in ("host", "client") for share in _SHARES), "steps/s"),
        rows,
    )
    return figures
