"""What the planner does for a load that swings: a fleet that it scales, against fleets that stay as they are.

Real are `dynamo serve` of the disaggregated example graph with all that belongs to it (frontend, router, NATS with the
prefill queue, circus, planner), every worker process, and the time that passes. Pretended are the engines alone
(fleet.py). Every arm gets the same requests at the same times.

Arms can also be run one by one (`--arms 2P2D --json a.json`) and put together (`--merge a.json b.json`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.harness.accounting import usage
from benchmarks.harness.generated import client_of, generator_of
from benchmarks.harness.report import Figures, progress
from benchmarks.harness.servers import NAMESPACE, Server, add_override, parse_overrides, running
from benchmarks.planner.cycles import Answer, Limits, Made, Outing, Swing, answer_of
from benchmarks.planner.device_time import DeviceLog
from benchmarks.planner.fleet import READY_S, Arm, Pace, parse_arm, start_arm
from benchmarks.planner.report import report, told
from dynamo_local.core.errors import UsageError
from dynamo_local.load.workload import Lengthwise, Uniform, drawn
from state.paths import StatePaths

SUMMARY = "a swinging load: a fleet scaled by the planner, against fleets of the same and of twice the size"
ARMS = ("planner:fitted", "planner", "2P2D", "3P2D", "4P4D")
_QUICK_ARMS = ("planner:fitted", "2P2D")
PROMPT, OUTPUT = 3000, 150
"""Tokens, as in Dynamo's benchmark of its planner."""
LIMITS = Limits(ttft_s=2.0, itl_s=0.05)
_USUAL = Swing(low=1.75, high=7.0, period_s=180.0, cycles=2)
_QUICK = Swing(low=1.75, high=7.0, period_s=40.0, cycles=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arms", nargs="+", help="2P2D and the like, planner, planner:fitted, planner:POLICY")
    parser.add_argument("--cycles", type=int, help=f"periods of the load ({_USUAL.cycles})")
    parser.add_argument("--period", type=float, help=f"length of a period, in s ({_USUAL.period_s:g})")
    parser.add_argument("--low", type=float, default=_USUAL.low, help="lowest rate, requests/s")
    parser.add_argument("--high", type=float, default=_USUAL.high, help="highest rate, requests/s")
    parser.add_argument("--adjustment", type=float, help="the planner's interval, in s (4 if fitted, else 5)")
    parser.add_argument("--ready", type=float, default=READY_S, help="what a new worker takes to be ready, in s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the load, a round each")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="run nothing, put saved runs together")
    add_override(parser)


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    if arguments.merge:
        return report([outing for path in arguments.merge for outing in _saved(path)], LIMITS)
    arms = [parse_arm(name) for name in arguments.arms or (_QUICK_ARMS if arguments.quick else ARMS)]
    usual = _QUICK if arguments.quick else _USUAL
    swing = Swing(arguments.low, arguments.high, arguments.period or usual.period_s, arguments.cycles or usual.cycles)
    pace = Pace(adjustment_s=arguments.adjustment, ready_s=arguments.ready)
    more = parse_overrides(arguments.override)
    outings = []
    for number, seed in enumerate(arguments.seeds):
        # ABBA: whatever drifts favours no arm.
        for arm in arms if number % 2 == 0 else reversed(arms):
            outings.append(await _outing(arm, swing, seed, pace, more))
            progress(told(outings[-1], LIMITS))
    return report(outings, LIMITS)


def _saved(path: Path) -> list[Outing]:
    try:
        runs = msgspec.json.decode(path.read_bytes())["runs"]
        return msgspec.convert(runs, list[Outing])
    except (OSError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} holds no saved runs: {error}", "name files written with --json") from error


async def _outing(arm: Arm, swing: Swing, seed: int, pace: Pace, more: Mapping[str, str]) -> Outing:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_arm(Path(scratch), arm, pace, more)
        async with running(server):
            await server.ready()
            progress(f"{arm.name}: ready; seed {seed}, {swing.seconds:.0f} s of load")
            before = usage(())
            async with DeviceLog(server) as log:
                answers = await _load(server, swing, seed)
            busy = usage(()).since(before)
            changes = _changes(server, log.begun)
    settings = dict(more) if arm.policy is None else {**_unusual(pace), **more}
    return Outing(arm.name, seed, swing, settings, answers, log.held, changes, busy.busy_s / busy.at)


def _unusual(pace: Pace) -> dict[str, str]:
    """What of a planner's pace is not as usual."""
    found = {} if pace.adjustment_s is None else {"adjustment": f"{pace.adjustment_s:g}s"}
    return found if pace.ready_s == READY_S else {**found, "ready": f"{pace.ready_s:g}s"}


async def _load(server: Server, swing: Swing, seed: int) -> list[Answer]:
    """The requests that the seed draws, each at its time, and all their answers."""
    shape = Lengthwise(Uniform(PROMPT, PROMPT), Uniform(OUTPUT, OUTPUT))
    async with client_of(server) as client:
        generator = generator_of(client, seed)
        await generator.open_loop(drawn(swing, shape, swing.seconds, seed))
    return [answer_of(record) for record in generator.records]


def _changes(server: Server, begun: float) -> list[Made]:
    """What the planner changed, or tried to. `begun` is when the load began (CLOCK_MONOTONIC, s)."""
    assert server.state_root is not None
    path = StatePaths(server.state_root, NAMESPACE).decisions_file
    decisions = map(msgspec.json.decode, path.read_bytes().splitlines() if path.exists() else [])
    return [
        Made(decision["at"] - begun, outcome["action"], outcome["took_s"], outcome["done"])
        for decision in decisions
        for outcome in decision["outcomes"]
    ]
