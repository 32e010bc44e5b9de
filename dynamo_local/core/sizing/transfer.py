"""Whether workers can lend each other the KV cache of a model, by its kind (docs/guides/models.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.core.sizing.pooling import is_pooling

_EXCLUSIVE = ("pipeline-parallel-size", "decode-context-parallel-size", "prefill-context-parallel-size")


def why_no_transfer(facts: ModelFacts, given: Mapping[str, Any], *, on_gpu: bool) -> str | None:
    """The reason why KV is not transferred; None if nothing is known against it. The engine decides in the end."""
    kinds = (
        (is_pooling(facts, given), "the model answers in one step, so requests never move"),
        (facts.has_recurrent_state, "the model has layers without a KV cache"),
        (facts.is_encoder_decoder, "the model has an encoder"),
        (facts.is_mla and not on_gpu, "not with latent attention on a CPU"),
        (_windowed(facts), "the model has layers with a sliding window"),
        (given.get("enable-prefix-caching") is False, "prefix caching is off"),
        (any(key in given for key in ("speculative-config", "spec-method", "spec-model")), "not with speculation"),
        (any((given.get(key) or 1) > 1 for key in _EXCLUSIVE), "only with tensor parallelism"),
    )
    return next((reason for holds, reason in kinds if holds), None)


def _windowed(facts: ModelFacts) -> bool:
    if facts.attention is None:
        return facts.sliding_window is not None
    return any(group.window is not None for group in facts.attention)
