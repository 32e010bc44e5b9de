"""What a run is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChaosSettings:
    """A run, on mockers unless changed.

    With the same seed, the same requests and faults are drawn in the same order; when each of them meets the other is
    up to the machine.
    """

    seconds: float = 60.0
    seed: int = 1
    workers: int = 8
    streams: int = 64
    faults_per_s: float = 3.0
    only: Sequence[str] = ()
    """Kinds of faults, by their names in `faults.Kind`; all of them if there are none."""
    step_ms: float = 20.0
    """Time of a mocker's step: many workers share few cores."""
    stall_s: float = 60.0
    """A request without a token for so long has been forgotten."""
    settle_s: float = 60.0
    """For the requests under way to end and the workers to be idle, once the faults have stopped."""


NAMESPACE = "chaos"
VOCAB_SIZE = 256
"""The mocker's."""
