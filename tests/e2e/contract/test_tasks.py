"""The frontend tells from a configuration what vLLM's loaded model says it can be asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.tasks import POOLING_TASKS, SCORE_TYPE_MAP, PoolingTask

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.patches.forks import look_at_models_here
from dynamo_local.engine.vllm.requests.wire import _OF_CLASS, _OF_SCORES, tasks_of
from dynamo_local.model.named.random_model import random_model
from tests.e2e.llm_server import PATIENCE_S
from tests.e2e.models.pooling_models import make_embedder

OF_BERT = (
    "BertModel",
    "BertSpladeSparseEmbeddingModel",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BgeM3EmbeddingModel",
    "HF_ColBERT",
    "RobertaModel",
    "XLMRobertaForSequenceClassification",
    "RobertaForTokenClassification",
)
OF_LLAMA: tuple[dict[str, Any], ...] = (
    {"runner": "pooling"},
    {"convert": "classify"},
    {"hf_overrides": {"architectures": ["LlamaForSequenceClassification"]}},
)


@pytest.fixture(scope="module")
def elsewhere(unpatched: BaseContext) -> Iterator[ProcessPoolExecutor]:
    """A process in which vLLM and Transformers make models. After that no engine can be forked from it, as other tests
    do from this one."""
    with ProcessPoolExecutor(1, mp_context=unpatched, initializer=look_at_models_here) as pool:
        yield pool


@pytest.fixture(scope="module")
def bert(elsewhere: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return elsewhere.submit(make_embedder, tmp_path_factory.mktemp("bert") / "embedder").result(PATIENCE_S)


def configured(model: Path, **options: Any) -> VllmConfig:
    return EngineArgs(model=str(model), dtype="float32", enforce_eager=True, **options).create_engine_config()


def told(model: Path) -> tuple[str, ...]:
    """What is told from the configuration."""
    return tasks_of(configured(model).model_config)


def told_and_found(model: Path, options: dict[str, Any]) -> tuple[set[str], set[str]]:
    """What is told from the configuration, and what the model says, without its weights."""
    config = configured(model, **options)
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            # Without groups, here of a single rank, vLLM makes no model.
            with tempfile.TemporaryDirectory() as folder:
                init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
                initialize_model_parallel(1, 1)
        with torch.device("meta"):
            made: Any = initialize_model(config)
    return set(tasks_of(config.model_config)), set(made.pooler.get_supported_tasks())


def told_of_plugin(model: Path) -> str:
    """The error for a model that needs a plugin: a configuration with another model's name, for vLLM has no such model
    on a CPU."""
    model_config: Any = configured(model).model_config
    info = model_config._model_info
    model_config._model_info = info.__class__(**{**vars(info), "architecture": "Terratorch"})
    with pytest.raises(EngineError) as raised:
        tasks_of(model_config)
    return str(raised.value)


@pytest.mark.parametrize("architecture", OF_BERT)
def test_an_architecture_has_the_tasks_of_its_model(
    elsewhere: ProcessPoolExecutor, bert: Path, architecture: str
) -> None:
    options = {"hf_overrides": {"architectures": [architecture]}}
    expected, found = elsewhere.submit(told_and_found, bert, options).result(PATIENCE_S)
    assert expected == found


@pytest.mark.parametrize("options", OF_LLAMA, ids=str)
def test_a_model_that_generates_has_the_tasks_that_it_is_converted_to(
    elsewhere: ProcessPoolExecutor, options: dict[str, Any]
) -> None:
    expected, found = elsewhere.submit(told_and_found, random_model(), options).result(PATIENCE_S)
    assert expected == found


def test_a_model_that_generates_does_nothing_else(elsewhere: ProcessPoolExecutor) -> None:
    assert elsewhere.submit(told, random_model()).result(PATIENCE_S) == ("generate",)


def test_a_model_that_needs_a_plugin_is_refused(elsewhere: ProcessPoolExecutor, bert: Path) -> None:
    assert "plugin" in elsewhere.submit(told_of_plugin, bert).result(PATIENCE_S)


def test_every_task_and_every_kind_of_scores_is_known() -> None:
    assert set(_OF_SCORES) == set(SCORE_TYPE_MAP.values())
    assert {task for tasks in (*_OF_CLASS.values(), *_OF_SCORES.values()) for task in tasks} == {
        *get_args(PoolingTask)
    } - {"plugin"}
    assert "plugin" in POOLING_TASKS
