"""Whether a model is served as a pooling model (embeddings, classes, scores), and what its frontend is given then."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dynamo_local.core.sizing.machine import Choice
from dynamo_local.core.sizing.model_facts import ModelFacts

MAX_REQUESTS = "max-requests"

_ENDS = (
    "ForSequenceClassification", "ForTokenClassification", "ForTextEncoding", "ForRewardModeling", "Model",
)  # fmt: skip
"""Ends of the names of architectures that vLLM makes pooling models of, if it has no code for just these. Its list is
`_SUFFIX_TO_DEFAULTS` in vllm/config/model.py."""
_ENDS_OF_GENERATION = ("ChatModel", "LMHeadModel")

_INPUTS_IN_FLIGHT = 4096


def pools_by_name(architecture: str | None, pooling: Collection[str], known: Collection[str]) -> bool:
    """Tell by the name of the architecture. `known` are those that vLLM has code for, `pooling` those among them that
    do not generate."""
    if architecture is None or architecture in known:
        return architecture in pooling
    return architecture.endswith(_ENDS) and not architecture.endswith(_ENDS_OF_GENERATION)


def is_pooling(facts: ModelFacts, given: Mapping[str, Any]) -> bool:
    """Whether vLLM serves the model so, with the arguments that the user gives."""
    runner, convert = given.get("runner"), given.get("convert")
    if runner in ("generate", "pooling"):
        return bool(runner == "pooling")
    return convert in ("embed", "classify") or facts.pools


def frontend_choice(facts: ModelFacts, given: Mapping[str, Any]) -> Choice | None:
    """The number of inputs in flight: clients of pooling models send many at once, and each takes one step."""
    if not is_pooling(facts, given):
        return None
    reason = "each input takes one step, and clients send up to 2048 in a request"
    return Choice(MAX_REQUESTS, _INPUTS_IN_FLIGHT, reason, "frontend")
