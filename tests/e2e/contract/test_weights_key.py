"""The key under which workers share weights: another one whenever the weights may be others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from dynamo_local.engine.vllm.weights import prepared
from dynamo_local.engine.vllm.weights.key import weight_bytes, weights_key, why_not_shared
from dynamo_local.model.named.random_model import random_model

ENVIRON = {"OMP_NUM_THREADS": "1", "VLLM_CPU_SGL_KERNEL": "0", "HOME": "/root"}
CONFIG: dict[str, Any] = {"max-model-len": 512, "enforce-eager": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(random_model(), found)
    return found


def configured(folder: Path, **arguments: Any) -> VllmConfig:
    given = {"model": str(folder), "max_model_len": 512, "enforce_eager": True, **arguments}
    return AsyncEngineArgs(**given).create_engine_config()


@pytest.fixture(scope="module")
def vllm_config(folder: Path) -> VllmConfig:
    return configured(folder)


def test_the_same_model_has_the_same_key(folder: Path, vllm_config: VllmConfig) -> None:
    key = weights_key(vllm_config, CONFIG, ENVIRON)
    assert weights_key(configured(folder), {**CONFIG, "prepared-weights": True}, ENVIRON) == key
    others = {"served-model-name": ["a"], "lora-modules": ["pirate=/a"]}
    assert weights_key(vllm_config, {**CONFIG, **others}, ENVIRON) == key
    assert weights_key(vllm_config, CONFIG, {**ENVIRON, "OMP_NUM_THREADS": "2", "HOME": "/elsewhere"}) == key


@pytest.mark.parametrize("arguments", [{"dtype": "float32"}, {"enable_lora": True}, {"max_model_len": 256}], ids=str)
def test_what_vllm_settles_changes_the_key(folder: Path, vllm_config: VllmConfig, arguments: dict[str, Any]) -> None:
    other = configured(folder, **arguments)
    assert weights_key(other, CONFIG, ENVIRON) != weights_key(vllm_config, CONFIG, ENVIRON)


def test_arguments_and_variables_change_the_key(vllm_config: VllmConfig) -> None:
    key = weights_key(vllm_config, CONFIG, ENVIRON)
    assert weights_key(vllm_config, {**CONFIG, "max-num-seqs": 3}, ENVIRON) != key
    assert weights_key(vllm_config, CONFIG, {**ENVIRON, "VLLM_CPU_SGL_KERNEL": "1"}) != key
    assert weights_key(vllm_config, CONFIG, {**ENVIRON, "ONEDNN_MAX_CPU_ISA": "AVX2"}) != key


def _touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def _replace(path: Path) -> None:
    """Put another file in its place, of the same size and time."""
    status = path.stat()
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    copy.rename(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [_touch, _replace])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_that_have_changed_change_the_key(
    folder: Path, vllm_config: VllmConfig, name: str, change: Callable[[Path], None]
) -> None:
    key = weights_key(vllm_config, CONFIG, ENVIRON)
    change(folder / name)
    assert weights_key(vllm_config, CONFIG, ENVIRON) != key


def test_only_weights_that_are_known_to_be_the_same_are_shared(folder: Path, vllm_config: VllmConfig) -> None:
    assert why_not_shared(vllm_config) is None
    dummy = configured(folder, load_format="dummy")
    assert why_not_shared(dummy) == "its load format is dummy"
    compiled = configured(folder, enforce_eager=False)
    assert why_not_shared(compiled) == "the engine compiles its model"
    assert "several processes" in str(why_not_shared(configured(folder, tensor_parallel_size=2)))


def test_an_order_tells_how_much_memory_weights_take(folder: Path, vllm_config: VllmConfig) -> None:
    size = (folder / "model.safetensors").stat().st_size
    assert weight_bytes(vllm_config) >= size
    order = prepared.settle_weights(vllm_config, CONFIG, wanted=True)
    assert order is not None
    assert order.weight_bytes == weight_bytes(vllm_config)
    assert order.key == weights_key(vllm_config, CONFIG)
    assert prepared.settle_weights(vllm_config, CONFIG, wanted=False) is None


def test_weights_that_are_others_by_now_are_given_up(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prepared, "_prepared", ("another key", None))
    assert prepared.settle_weights(vllm_config, CONFIG, wanted=True) is not None
    assert vars(prepared)["_prepared"] is None
    assert "it loads its own" in caplog.text
    assert len(caplog.records) == 1
