"""What goes wrong, how often, and for how long. The draws are pure; `injector.py` does them."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from dataclasses import dataclass


class Kind(enum.Enum):
    """A fault, in words."""

    KILL_WORKER = "worker killed"
    STOP_WORKER = "worker stopped for a while"
    KILL_ENGINE = "worker's engine killed"
    STOP_ENGINE = "worker's engine stopped for a while"
    DRAIN_WORKER = "worker told to end"
    TURN_WORKER = "worker turned to prefill for a while"
    KILL_ROUTER = "router killed"
    STOP_ROUTER = "router stopped for a while"
    KILL_BUS = "NATS killed"
    STOP_BUS = "NATS stopped for a while"
    SEVER_FRONTEND = "frontend's connection broken"
    SILENCE_FRONTEND = "frontend's connection dead for a while"
    KILL_FRONTEND = "frontend killed"


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
}
"""A worker takes half a minute to come back there, and it has an engine of its own."""

OF_WORKERS = frozenset(
    {
        Kind.KILL_WORKER,
        Kind.STOP_WORKER,
        Kind.KILL_ENGINE,
        Kind.STOP_ENGINE,
        Kind.DRAIN_WORKER,
        Kind.TURN_WORKER,
    }
)
OF_ENGINES = frozenset({Kind.KILL_ENGINE, Kind.STOP_ENGINE})
PASSING = frozenset({Kind.STOP_WORKER, Kind.STOP_ENGINE, Kind.STOP_ROUTER, Kind.STOP_BUS, Kind.TURN_WORKER})
"""The process is stopped, or does something else, and goes on afterwards."""

OF_THE_BUS = frozenset({Kind.KILL_BUS, Kind.STOP_BUS, Kind.SEVER_FRONTEND, Kind.SILENCE_FRONTEND})
"""One at a time: each takes everything down for a while."""


@dataclass(frozen=True)
class Draw:
    """The next fault: after a pause, of a kind, on the target at this share of those there are, for so long."""

    pause_s: float
    kind: Kind
    target: float
    seconds: float


def draw_fault(rng: random.Random, faults_per_s: float, weights: Mapping[Kind, int]) -> Draw:
    """The pauses are exponential, the lengths mostly short: 0.2 to 6 s."""
    return Draw(
        pause_s=rng.expovariate(faults_per_s),
        kind=rng.choices(list(weights), weights=list(weights.values()))[0],
        target=rng.random(),
        seconds=0.2 + 5.8 * rng.random() ** 2,
    )
