"""The names of models that come with this package, and the folders that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.errors import UsageError
from dynamo_local.model.named.random_model import random_model
from dynamo_local.model.named.smollm2 import smollm2

SMOLLM2 = "smollm2"
"""A real model of 135 million parameters, fetched as a Python package."""

RANDOM = "random"
"""A model with random weights, made here. Its answers mean nothing."""

QUICKSTART = "quickstart"
"""`smollm2` where it can be had, otherwise `random`."""

NAMES = (SMOLLM2, RANDOM, QUICKSTART)

Step = Callable[[str], None]
"""Shows one line about the progress, such as Report.step."""


@dataclass(frozen=True)
class NamedModel:
    """What a name stands for. `dtype` is the one to load it in; None leaves that to vLLM, which reads config.json."""

    folder: Path
    served_name: str
    dtype: str | None = None


def named_model(name: str, step: Step, cache_root: Path | None = None) -> NamedModel:
    """The model of one of NAMES, made or fetched at the first call; that may take a minute. `cache_root` as for
    `random_model`.

    Raises UsageError when the model cannot be had, KeyError for another name.
    """
    return _MODELS[name](step, cache_root)


def _random(step: Step, cache_root: Path | None, served_name: str = RANDOM) -> NamedModel:
    # In float32, as it was made: so small a model suffers most from less precision.
    return NamedModel(random_model(cache_root), served_name, "float32")


def _smollm2(step: Step, cache_root: Path | None) -> NamedModel:
    return NamedModel(smollm2(step, cache_root), SMOLLM2)


def _quickstart(step: Step, cache_root: Path | None) -> NamedModel:
    try:
        return NamedModel(smollm2(step, cache_root), QUICKSTART)
    except UsageError as error:
        step(f"{error.cause}: serving the model {RANDOM!r} instead, whose answers mean nothing")
        return _random(step, cache_root, QUICKSTART)


_MODELS: dict[str, Callable[[Step, Path | None], NamedModel]] = {
    SMOLLM2: _smollm2,
    RANDOM: _random,
    QUICKSTART: _quickstart,
}
