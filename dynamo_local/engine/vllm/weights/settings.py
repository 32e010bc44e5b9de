"""The setting for weights that workers share. Known without importing vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WeightSettings:
    """Setting of the worker for its engine's weights."""

    prepared_weights: bool = field(
        default=True,
        metadata={
            "help": "Whether a process is kept that has loaded the model's weights, so that further workers start "
            "without loading them. CPU only, and only where memory allows: the weights are there once more."
        },
    )
