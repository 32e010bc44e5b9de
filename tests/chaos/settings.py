"""What a run is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ChaosSettings:
    """A run, on mockers unless changed.

    With the same seed, the same requests and faults are drawn in the same order; when each of them meets the other is
    up to the machine.
    """

    seconds: float = 60.0
    seed: int = 1
    graph: Literal["agg", "disagg"] = "agg"
    real_model: bool = False
    """On vLLM: SmolLM2 in bfloat16 instead of the quick start's model in float32."""
    workers: int = 8
    """Those that decode."""
    prefill_workers: int = 0
    streams: int = 64
    faults_per_s: float = 3.0
    moves_per_s: float = 5.0
    """Requests that are moved by hand; those of workers that are told to end move besides."""
    least_moves: int = 0
    """The run goes on until so many orders have had a request moved, but ten times as long at most."""
    only: Sequence[str] = ()
    """Kinds of faults, by their names in `faults.Kind`; all of them if there are none."""
    without: Sequence[str] = ()
    """Kinds of faults that are left out."""
    most_faults: int | None = None
    """The run ends when so many were done."""
    step_ms: float = 25.0
    """Time of a mocker's step: many workers share few cores."""
    stall_s: float = 60.0
    """A request without a token for so long has been forgotten."""
    gap_slack_s: float = 3.0
    """How much longer a stream may go without a token than the faults that it has met account for."""
    settle_s: float = 60.0
    """For the requests under way to end and the workers to be idle, once the faults have stopped."""

    max_local_prefill_length: int = 100
    """With prefill workers: longer prompts are theirs."""

    @property
    def longest_local_prefill(self) -> int | None:
        """What the frontends are told; None: there are no prefill workers."""
        return self.max_local_prefill_length if self.graph == "disagg" else None


ON_DISAGG: dict[str, Any] = {
    "graph": "disagg",
    "workers": 4,
    "prefill_workers": 4,
    "streams": 48,
    # A frontend that lives tells a worker again that a prefill was fetched; one that was killed is missed for 10 s.
    "settle_s": 45.0,
}

NAMESPACE = "chaos"
BLOCK_SIZE = 16
VOCAB_SIZE = 256
"""The mocker's."""
