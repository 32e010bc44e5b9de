"""Settings of a chaos run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ChaosSettings:
    """Settings of a run, with defaults for mockers.

    The same seed draws the same requests and faults in the same order. Which request meets which fault depends on the
    machine.
    """

    seconds: float = 60.0
    seed: int = 1
    graph: Literal["agg", "disagg"] = "agg"
    real_model: bool = False
    """With vLLM: use SmolLM2 in bfloat16 instead of the model `random` in float32."""
    workers: int = 8
    """Number of workers that decode."""
    prefill_workers: int = 0
    streams: int = 64
    faults_per_s: float = 3.0
    migrations_per_s: float = 5.0
    """Rate of ordered migrations. Requests of workers that are told to end migrate besides."""
    least_migrations: int = 0
    """The run goes on until this many requests have migrated as ordered, but at most ten times as long."""
    only: Sequence[str] = ()
    """Names of the kinds of faults to inject (`faults.Kind`); empty: all."""
    without: Sequence[str] = ()
    """Names of the kinds of faults to leave out."""
    most_faults: int | None = None
    """The run ends after this many faults."""
    step_ms: float = 25.0
    """Time of a mocker's step, long enough for many workers on few cores."""
    stall_s: float = 60.0
    """Time without a token after which a request counts as forgotten."""
    gap_slack_s: float = 3.0
    """Time by which a gap of a stream may exceed what the faults explain."""
    settle_s: float = 60.0
    """Time after the last fault within which all requests must end and all workers be idle."""

    max_local_prefill_length: int = 100
    """With prefill workers: prompts above this length go to them."""

    @property
    def longest_local_prefill(self) -> int | None:
        """Maximum length of prompts that decode workers prefill; None: there are no prefill workers."""
        return self.max_local_prefill_length if self.graph == "disagg" else None


ON_DISAGG: dict[str, Any] = {
    "graph": "disagg",
    "workers": 4,
    "prefill_workers": 4,
    "streams": 48,
    # Prefills of a killed frontend are kept until the frontend has been missing for 10 s.
    "settle_s": 45.0,
}

NAMESPACE = "chaos"
BLOCK_SIZE = 16
VOCAB_SIZE = 256
"""Size of the mocker's vocabulary."""
