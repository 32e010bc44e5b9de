"""What is read from the sources of vLLM and Transformers is what the libraries say when they are imported."""

from __future__ import annotations

import pytest

from dynamo_local.model import facts

pytest.importorskip("vllm", reason="vLLM is not installed")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import ModelRegistry
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.model_loader.weight_utils import filter_files_not_needed_for_inference
from vllm.model_executor.models import registry
from vllm.transformers_utils.config import _CONFIG_REGISTRY

from dynamo_local.model.weights import _TRAINING


def test_architectures() -> None:
    assert facts.vllm_architectures() == frozenset(ModelRegistry.get_supported_archs())
    assert facts.vllm_retired() == registry._PREVIOUSLY_SUPPORTED_MODELS
    assert facts.vllm_moved() == registry._OOT_SUPPORTED_MODELS


def test_what_only_pools() -> None:
    """A class that is listed with those that generate as well is none of them."""
    classes = {name: cls for table in (registry._TEXT_GENERATION_MODELS,) for name, (_, cls) in table.items()}
    pooling = facts.vllm_pooling()
    assert pooling is not None
    assert pooling <= frozenset(ModelRegistry.get_supported_archs())
    assert pooling.isdisjoint(classes)
    assert {"BertModel", "Qwen2ForRewardModel", "HF_ColBERT"} <= pooling


def test_architectures_of_transformers() -> None:
    names = facts.transformers_architectures()
    assert names is not None
    of_library = {
        name
        for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ([value] if isinstance(value, str) else value)
    }
    assert of_library <= names


def test_model_types() -> None:
    names = facts.known_model_types()
    assert names is not None
    assert {*CONFIG_MAPPING_NAMES, *_CONFIG_REGISTRY} <= names


def test_quantizations() -> None:
    assert facts.vllm_quantizations() == frozenset(QUANTIZATION_METHODS)


def test_files_of_a_training() -> None:
    assert filter_files_not_needed_for_inference([*_TRAINING, "model.bin"]) == ["model.bin"]
