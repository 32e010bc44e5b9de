"""What a model can be asked for, told from its configuration.

vLLM asks the loaded model. The frontend has none, and starts before its workers have. The tables follow the classes of
vLLM 0.32 (`pooler` of each model in vllm/model_executor/models); the contract test compares them with its engines.
"""

from __future__ import annotations

from typing import Any

from vllm.tasks import SupportedTask

from dynamo_local.core.errors import EngineError

_EMBED: tuple[SupportedTask, ...] = ("embed", "token_embed")
_CLASSIFY: tuple[SupportedTask, ...] = ("classify", "token_classify")
_TOKEN_CLASSIFY: tuple[SupportedTask, ...] = ("token_classify",)
_TOKEN_EMBED: tuple[SupportedTask, ...] = ("token_embed",)

_OF_CLASS: dict[str, tuple[SupportedTask, ...]] = {
    "BgeM3EmbeddingModel": ("embed", "embed&token_classify", "token_classify", "token_embed"),
    "ForSequenceClassification": _CLASSIFY,
    "ForTokenClassification": _TOKEN_CLASSIFY,
    "RewardModel": _TOKEN_CLASSIFY,
}
"""By the end of the name of the model's class in vLLM."""

_OF_SCORES: dict[str, tuple[SupportedTask, ...]] = {
    "bi-encoder": _EMBED,
    "cross-encoder": _CLASSIFY,
    "late-interaction": _TOKEN_EMBED,
}
"""By the way in which vLLM computes scores with other models."""

_PLUGINS = ("Terratorch", "ClefOmniForJointSchema")
"""Classes whose outputs only a plugin of vLLM can read."""


def tasks_of(model_config: Any) -> tuple[SupportedTask, ...]:
    """Tell the tasks from vLLM's ModelConfig. Raises EngineError for a model that only plugins can serve."""
    if model_config.runner_type != "pooling":
        return ("generate",)
    info = model_config._model_info
    if not info.is_pooling_model:
        # vLLM makes a pooling model of one that generates.
        return _CLASSIFY if model_config.convert_type == "classify" else _EMBED
    if info.architecture in _PLUGINS:
        what = f"models like {info.architecture} need a plugin of vLLM, which is not supported"
        raise EngineError(what, "choose another model")
    named = (tasks for end, tasks in _OF_CLASS.items() if info.architecture.endswith(end))
    return next(named, None) or _OF_SCORES[info.score_type]
