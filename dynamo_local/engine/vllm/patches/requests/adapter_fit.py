"""Refuses a LoRA adapter of which no tensor is for a module of the model.

vLLM loads it without a word, and answers as the model alone would. Most such adapters are found before, from the files
(model/adapter.py); vLLM alone knows by which names its model has the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies


@cache
def refuse_adapters_of_other_models() -> None:
    """Patch the loading of adapters in this process, and so in those forked from it. A second call changes nothing."""
    if not applies("adapters that fit nothing"):
        return
    from vllm.lora.model_manager import LoRAModelManager

    # Through a name of no type: mypy sees no more than that a method is assigned.
    manager: Any = LoRAModelManager
    manager._create_merged_loras_inplace = _comparing(manager._create_merged_loras_inplace)


def _comparing(merge: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @wraps(merge)
    def comparing(manager: Any, lora_model: Any) -> None:
        names = list(lora_model.loras)
        merge(manager, lora_model)
        from vllm.distributed import get_pp_group

        is_whole = get_pp_group().world_size == 1 and not lora_model.modules_to_save
        if is_whole and not any(manager._get_lora_layer_weights(lora_model, name) for name in manager.modules):
            shown = f"such as {names[0]}" if names else "there are none"
            raise ValueError(f"none of its tensors is for a module of the model ({shown})")

    return comparing
