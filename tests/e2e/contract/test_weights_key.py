"""The key under which workers share weights: another one whenever the weights may be others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from dynamo_local.engine.vllm import weights
from dynamo_local.engine.vllm.launch import _set_up_transfer
from dynamo_local.engine.vllm.patches.loaded_model import Loaded
from dynamo_local.engine.vllm.weights import files_of, weight_bytes, weights_key, why_not_shared
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
    order = weights.settle_weights(vllm_config, CONFIG, wanted=True)
    assert order is not None
    assert order.weight_bytes == weight_bytes(vllm_config)
    assert order.key == weights_key(vllm_config, CONFIG)
    assert weights.settle_weights(vllm_config, CONFIG, wanted=False) is None


def test_weights_that_are_others_by_now_are_given_up(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = weights._Recipe("another key", b"", b"")
    monkeypatch.setattr(weights, "_prepared", (recipe, None))
    assert weights.settle_weights(vllm_config, CONFIG, wanted=True) is not None
    assert vars(weights)["_prepared"] is None
    assert "it loads its own" in caplog.text
    assert len(caplog.records) == 1


def test_an_engine_whose_model_was_lent_before_is_configured_once(
    folder: Path, vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[VllmConfig] = []

    def configuration(transfer: KVTransferConfig | None = None) -> VllmConfig:
        made.append(configured(folder, kv_transfer_config=transfer))
        return made[-1]

    first, identity, _ = _set_up_transfer(configuration, wanted=True)
    assert len(made) == 2
    loaded = Loaded(None, first, {})
    monkeypatch.setattr(weights, "_prepared", (weights._Recipe("key", b"", weights._encoded(files_of(first))), loaded))
    again = _set_up_transfer(configuration, wanted=True)
    assert len(made) == 3
    assert again == (made[-1], identity, None), "another one, whose KV nobody would take"
    assert made[-1].kv_transfer_config is not None
    assert _set_up_transfer(configuration, wanted=False)[0].kv_transfer_config is None
    # Other files may be a model that vLLM does not configure so.
    monkeypatch.setattr(weights, "_prepared", (weights._Recipe("key", b"", b"other files"), loaded))
    made.clear()
    assert _set_up_transfer(configuration, wanted=True)[1] == identity
    assert len(made) == 2
    # An engine that lends nothing.
    monkeypatch.setattr(
        weights,
        "_prepared",
        (weights._Recipe("key", b"", weights._encoded(files_of(first))), Loaded(None, vllm_config, {})),
    )
    assert not weights.was_lent()
