"""An endpoint's workers of one role as the budget of devices sees them: a pool. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from dynamo_local.core.endpoints.devices import devices_of_worker
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.planning.observation import WorkerSeen

_FINEST = 1000
"""Shares of a device are counted exactly, in fractions with at most this denominator: sums of floats would not be."""


@dataclass(frozen=True)
class Pool:
    """An endpoint's workers of one role.

    `devices`: those of each worker, or its share of one. `ordered`: number of workers that the server was told to run.
    `staying` and `leaving`: workers that hold devices now. `fixed`: its number is not the planner's to change.
    """

    endpoint: str
    role: str
    created_at: float
    devices: Fraction
    minimum: int
    wanted: int
    ordered: int
    staying: int
    leaving: int = 0
    fixed: bool = False

    @property
    def age(self) -> tuple[float, str, str]:
        """Sort key: the oldest endpoint first."""
        return self.created_at, self.endpoint, self.role

    def unmet(self, workers: int) -> Fraction:
        """Share of the wanted workers that `workers` do not make up, 0 to 1."""
        return Fraction(max(self.wanted - workers, 0), max(self.wanted, 1))

    def takes(self, workers: int) -> Fraction:
        """Devices that the pool takes when brought to `workers`, while those that leave, or are still to leave, hold
        theirs."""
        return self.devices * (self.leaving + max(self.staying, workers))


def devices_of(spec: EndpointSpec, workers: Sequence[WorkerSeen]) -> Fraction:
    """Devices of each worker of an endpoint: as many as those that run hold, otherwise as the spec says. Workers
    without devices (mockers, say) count as well: otherwise the budget would not limit their number."""
    held = max((worker.devices for worker in workers), default=0)
    return exact(held or devices_of_worker(spec) or 1)


def exact(devices: float) -> Fraction:
    """A number of devices as a fraction."""
    return Fraction(devices).limit_denominator(_FINEST)
