"""What goes wrong, how often, and for how long. The draws are pure; `injector.py` does them."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.core.names import FORKSERVER_SERVICE


class Kind(enum.Enum):
    """A fault, in words."""

    KILL_WORKER = "worker killed"
    STOP_WORKER = "worker stopped for a while"
    KILL_ENGINE = "worker's engine killed"
    KILL_ENGINE_WORKER = "worker's engine's Worker killed"
    STOP_ENGINE = "worker's engine stopped for a while"
    HANG_ENGINE = "worker's engine hangs for good"
    FAIL_ENGINE = "worker's engine raises"
    KILL_LAUNCHER = "worker's launcher killed"
    STOP_LAUNCHER = "worker's launcher stopped for a while"
    DRAIN_WORKER = "worker told to end"
    TURN_WORKER = "worker turned to prefill for a while"
    KILL_ROUTER = "router killed"
    STOP_ROUTER = "router stopped for a while"
    KILL_BUS = "NATS killed"
    STOP_BUS = "NATS stopped for a while"
    SEVER_FRONTEND = "frontend's connection broken"
    SILENCE_FRONTEND = "frontend's connection dead for a while"
    KILL_FRONTEND = "frontend killed"
    KILL_PLANNER = "planner killed"
    STOP_PLANNER = "planner stopped for a while"
    KILL_FORKSERVER = "fork server killed"
    STOP_FORKSERVER = "fork server stopped for a while"
    KILL_CIRCUSD = "circusd killed"
    STOP_CIRCUSD = "circusd stopped for a while"
    STOP_SERVE = "dynamo serve stopped for a while"
    DAMAGE_STATEFILE = "statefile damaged"
    FILL_DISK = "state folder's disk full"
    FILL_SHM = "/dev/shm full"
    STEP_CLOCK = "wall clock stepped"


WEIGHTS = {
    Kind.KILL_WORKER: 30,
    Kind.STOP_WORKER: 42,
    Kind.DRAIN_WORKER: 6,
    Kind.TURN_WORKER: 10,
    Kind.KILL_ROUTER: 4,
    Kind.STOP_ROUTER: 3,
    Kind.KILL_BUS: 4,
    Kind.STOP_BUS: 3,
    Kind.SEVER_FRONTEND: 3,
    Kind.SILENCE_FRONTEND: 3,
    Kind.KILL_FRONTEND: 4,
    # More often, and most requests would have met two deaths, and wait to be tried alone.
    Kind.FAIL_ENGINE: 4,
    Kind.HANG_ENGINE: 1,
    Kind.KILL_CIRCUSD: 1,
    Kind.STOP_CIRCUSD: 2,
    Kind.STOP_SERVE: 2,
    Kind.DAMAGE_STATEFILE: 3,
    Kind.FILL_DISK: 2,
    Kind.STEP_CLOCK: 3,
    Kind.KILL_LAUNCHER: 6,
    Kind.STOP_LAUNCHER: 4,
    Kind.KILL_FORKSERVER: 2,
    Kind.STOP_FORKSERVER: 2,
}

WEIGHTS_ON_VLLM = {
    Kind.KILL_WORKER: 3,
    Kind.KILL_ENGINE: 2,
    Kind.STOP_WORKER: 4,
    Kind.STOP_ENGINE: 3,
    Kind.DRAIN_WORKER: 1,
    Kind.KILL_ROUTER: 2,
    Kind.STOP_ROUTER: 1,
    Kind.KILL_BUS: 2,
    Kind.STOP_BUS: 2,
    Kind.KILL_ENGINE_WORKER: 2,
    Kind.HANG_ENGINE: 1,
    Kind.KILL_LAUNCHER: 1,
    Kind.STOP_LAUNCHER: 1,
    Kind.KILL_PLANNER: 1,
    Kind.STOP_PLANNER: 1,
    Kind.KILL_FORKSERVER: 1,
    Kind.STOP_FORKSERVER: 1,
    Kind.KILL_CIRCUSD: 1,
    Kind.STOP_CIRCUSD: 1,
    Kind.STOP_SERVE: 1,
    Kind.DAMAGE_STATEFILE: 2,
    Kind.FILL_DISK: 1,
    Kind.FILL_SHM: 1,
    Kind.STEP_CLOCK: 1,
}
"""A worker takes half a minute to come back there, and it has an engine of its own."""

OF_WORKERS = frozenset(
    {
        Kind.KILL_WORKER,
        Kind.STOP_WORKER,
        Kind.KILL_ENGINE,
        Kind.KILL_ENGINE_WORKER,
        Kind.STOP_ENGINE,
        Kind.HANG_ENGINE,
        Kind.FAIL_ENGINE,
        Kind.KILL_LAUNCHER,
        Kind.STOP_LAUNCHER,
        Kind.DRAIN_WORKER,
        Kind.TURN_WORKER,
    }
)
PASSING = frozenset(
    {
        Kind.STOP_WORKER,
        Kind.STOP_ENGINE,
        Kind.STOP_LAUNCHER,
        Kind.STOP_ROUTER,
        Kind.STOP_BUS,
        Kind.STOP_PLANNER,
        Kind.STOP_FORKSERVER,
        Kind.TURN_WORKER,
    }
)
"""The process is stopped, or does something else, and goes on afterwards."""

ORDERED = frozenset({Kind.HANG_ENGINE, Kind.FAIL_ENGINE})
"""Of the engine itself, which a mocker is told to. Its worker is replaced."""

DEADLY = frozenset(
    {
        Kind.KILL_WORKER,
        Kind.KILL_ENGINE,
        Kind.KILL_ENGINE_WORKER,
        Kind.HANG_ENGINE,
        Kind.FAIL_ENGINE,
        Kind.KILL_LAUNCHER,
    }
)
"""For the engine. What it worked on may be taken for the cause."""

OF_SERVICES = {
    Kind.KILL_ROUTER: "Router",
    Kind.STOP_ROUTER: "Router",
    Kind.KILL_PLANNER: "Planner",
    Kind.STOP_PLANNER: "Planner",
    Kind.KILL_FORKSERVER: FORKSERVER_SERVICE,
    Kind.STOP_FORKSERVER: FORKSERVER_SERVICE,
}
"""What is there once, and which service that is."""

OF_THE_MACHINERY = frozenset(
    {
        Kind.KILL_CIRCUSD,
        Kind.STOP_CIRCUSD,
        Kind.STOP_SERVE,
        Kind.DAMAGE_STATEFILE,
        Kind.FILL_DISK,
        Kind.FILL_SHM,
        Kind.STEP_CLOCK,
    }
)
"""What keeps the services, and what is around them: one at a time."""

OF_THE_BUS = frozenset({Kind.KILL_BUS, Kind.STOP_BUS, Kind.SEVER_FRONTEND, Kind.SILENCE_FRONTEND})
"""One at a time: each takes everything down for a while."""


STALL_TIMEOUT_S = 12.0
"""`stall-timeout-s` of the workers under fire: longer than a worker is stopped."""

_MISSED_S = 2.5
"""Until who says nothing is missed, and what it had goes on elsewhere."""

_ANEW_S = 3.0
"""After NATS, or the way to it, is back: until both sides have connected and asked for what they have missed."""

_EXCUSED_S: Mapping[Kind, Callable[[float], float]] = {
    Kind.STOP_ENGINE: lambda seconds: seconds,
    Kind.HANG_ENGINE: lambda _: STALL_TIMEOUT_S + _MISSED_S,
    Kind.KILL_BUS: lambda _: 2 * _ANEW_S,
    Kind.STOP_BUS: lambda seconds: seconds + _ANEW_S,
    Kind.SEVER_FRONTEND: lambda seconds: seconds / 2 + _ANEW_S,
    Kind.SILENCE_FRONTEND: lambda seconds: seconds + _ANEW_S,
    Kind.KILL_FRONTEND: lambda _: 0.0,
    Kind.KILL_PLANNER: lambda _: 0.0,
    Kind.STOP_PLANNER: lambda _: 0.0,
    Kind.KILL_FORKSERVER: lambda _: 0.0,
    Kind.STOP_FORKSERVER: lambda _: 0.0,
    Kind.KILL_CIRCUSD: lambda _: 0.0,
    Kind.STOP_CIRCUSD: lambda _: 0.0,
    Kind.STOP_SERVE: lambda _: 0.0,
    Kind.DAMAGE_STATEFILE: lambda _: 0.0,
    Kind.FILL_DISK: lambda _: 0.0,
    Kind.STEP_CLOCK: lambda _: 0.0,
}
"""How long a stream that meets a fault of so many seconds may wait because of it, where that is not `_MISSED_S`."""


def excused_s(kind: Kind, seconds: float) -> float:
    """How long a stream that meets the fault may go without a token because of it."""
    known = _EXCUSED_S.get(kind)
    return _MISSED_S if known is None else known(seconds)


@dataclass(frozen=True)
class Draw:
    """The next fault: after a pause, of a kind, on the target at this share of those there are, for so long."""

    pause_s: float
    kind: Kind
    target: float
    seconds: float


@dataclass(frozen=True)
class Done:
    """A fault that was done, `at` seconds after the start."""

    at: float
    kind: str
    target: str
    seconds: float
    what: Kind


def wanted(kind: Kind, only: Sequence[str], without: Sequence[str]) -> bool:
    """Whether faults of this kind are to be done, by the names of those that are chosen, or left out."""
    return (not only or kind.name in only) and kind.name not in without


def draw_fault(rng: random.Random, faults_per_s: float, weights: Mapping[Kind, int]) -> Draw:
    """The pauses are exponential, the lengths mostly short: 0.2 to 6 s."""
    return Draw(
        pause_s=rng.expovariate(faults_per_s),
        kind=rng.choices(list(weights), weights=list(weights.values()))[0],
        target=rng.random(),
        seconds=0.2 + 5.8 * rng.random() ** 2,
    )
