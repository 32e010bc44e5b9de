"""Kinds of faults, their weights, and the gaps that they explain. Pure; `injector.py` injects them."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.core.names import FORKSERVER_SERVICE


class Kind(enum.Enum):
    """A kind of fault. The value describes it in words."""

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
    SWITCH_ROLE = "worker switched to prefill for a while"
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
    Kind.SWITCH_ROLE: 10,
    Kind.KILL_ROUTER: 4,
    Kind.STOP_ROUTER: 3,
    Kind.KILL_BUS: 4,
    Kind.STOP_BUS: 3,
    Kind.SEVER_FRONTEND: 3,
    Kind.SILENCE_FRONTEND: 3,
    Kind.KILL_FRONTEND: 4,
    # No higher: otherwise most requests would meet two deaths, and wait for trials.
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
"""Weights with vLLM, whose workers have engine processes and take half a minute to start."""

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
        Kind.SWITCH_ROLE,
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
        Kind.SWITCH_ROLE,
    }
)
"""Faults after which the process goes on: it is stopped for a while, or has another role."""

ORDERED = frozenset({Kind.HANG_ENGINE, Kind.FAIL_ENGINE})
"""Faults of an engine that a mocker is ordered to have. Its worker is replaced afterwards."""

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
"""Faults that kill an engine. The frontend may suspect requests of that engine."""

OF_SERVICES = {
    Kind.KILL_ROUTER: "Router",
    Kind.STOP_ROUTER: "Router",
    Kind.KILL_PLANNER: "Planner",
    Kind.STOP_PLANNER: "Planner",
    Kind.KILL_FORKSERVER: FORKSERVER_SERVICE,
    Kind.STOP_FORKSERVER: FORKSERVER_SERVICE,
}
"""Faults of services with a single process, with the names of the services."""

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
"""Faults of the supervisor and its surroundings: one at a time."""

OF_THE_BUS = frozenset({Kind.KILL_BUS, Kind.STOP_BUS, Kind.SEVER_FRONTEND, Kind.SILENCE_FRONTEND})
"""Faults of NATS and of connections to it: one at a time, since each stops all requests for a while."""


STALL_TIMEOUT_S = 12.0
"""`stall-timeout-s` of the workers, longer than any worker is stopped."""

_LIVENESS_S = 2.5
"""Time until a silent worker is missed and its requests continue elsewhere, in seconds."""

_RECONNECT_S = 3.0
"""Time after the return of NATS until both sides have connected and exchanged what they have missed, in seconds."""

_ALLOWED_GAP_S: Mapping[Kind, Callable[[float], float]] = {
    Kind.STOP_ENGINE: lambda seconds: seconds,
    Kind.HANG_ENGINE: lambda _: STALL_TIMEOUT_S + _LIVENESS_S,
    Kind.KILL_BUS: lambda _: 2 * _RECONNECT_S,
    Kind.STOP_BUS: lambda seconds: seconds + _RECONNECT_S,
    Kind.SEVER_FRONTEND: lambda seconds: seconds / 2 + _RECONNECT_S,
    Kind.SILENCE_FRONTEND: lambda seconds: seconds + _RECONNECT_S,
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
"""Gap of a stream that a fault explains, in seconds, by the duration of the fault; `_LIVENESS_S` for other kinds."""


def allowed_gap_s(kind: Kind, seconds: float) -> float:
    """Return how long a stream may go without a token because of the fault, in seconds."""
    known = _ALLOWED_GAP_S.get(kind)
    return _LIVENESS_S if known is None else known(seconds)


@dataclass(frozen=True)
class Draw:
    """A drawn fault. `target` chooses among the possible targets, by their share of the list, 0 to 1."""

    pause_s: float
    kind: Kind
    target: float
    seconds: float


@dataclass(frozen=True)
class Done:
    """A fault that was injected, `at` seconds after the start of the run."""

    at: float
    kind: str
    target: str
    seconds: float
    what: Kind


def wanted(kind: Kind, only: Sequence[str], without: Sequence[str]) -> bool:
    """Return whether faults of this kind are injected, given the names of chosen and of excluded kinds."""
    return (not only or kind.name in only) and kind.name not in without


def draw_fault(rng: random.Random, faults_per_s: float, weights: Mapping[Kind, int]) -> Draw:
    """Draw a fault: after an exponential pause, for 0.2 to 6 s, mostly short."""
    return Draw(
        pause_s=rng.expovariate(faults_per_s),
        kind=rng.choices(list(weights), weights=list(weights.values()))[0],
        target=rng.random(),
        seconds=0.2 + 5.8 * rng.random() ** 2,
    )
