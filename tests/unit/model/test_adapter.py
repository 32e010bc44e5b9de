"""An adapter that vLLM cannot load, or that does not fit its base, is told in one line."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.model.adapter import CONFIG, check_adapter, read_base
from tests.unit.adapter_files import FINE, Q_PROJ, WEIGHTS, adapter, pair, tensors

BASE = {
    f"model.{Q_PROJ}.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 96),
    "model.layers.0.mlp.experts.0.up_proj.weight": (96, 32),
    "model.embed_tokens.weight": (100, 32),
    "model.norm.weight": (32,),
}


def base(path: Path, shapes: dict[str, tuple[int, ...]] | None = None, dtype: str = "F32") -> Any:
    path.mkdir()
    tensors(path / "model.safetensors", BASE if shapes is None else shapes, dtype)
    return read_base(path)


def refusal(path: Path, of: Any = None) -> str:
    with pytest.raises(UsageError) as why:
        check_adapter("fr", path, of)
    assert "\n" not in str(why.value)
    assert why.value.cause.startswith(f"adapter fr: {path} ")
    return why.value.cause.removeprefix(f"adapter fr: {path} ")


def test_the_rank_of_an_adapter_is_read(tmp_path: Path) -> None:
    assert check_adapter("fr", adapter(tmp_path / "a")) == 8
    patterned = adapter(
        tmp_path / "b",
        {**FINE, "rank_pattern": {"down_proj": 40}},
        {**pair(f"model.{Q_PROJ}", (8, 32), (64, 8)), **pair("model.layers.0.mlp.down_proj", (40, 96), (32, 40))},
    )
    assert check_adapter("fr", patterned, base(tmp_path / "base")) == 40
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / CONFIG).write_text(json.dumps(FINE))
    (tmp_path / "c" / "adapter_model.bin").write_bytes(b"\x80\x02")
    assert check_adapter("fr", tmp_path / "c") == 8


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    without = adapter(tmp_path / "weightless")
    (without / WEIGHTS).unlink()
    cut = adapter(tmp_path / "zip")
    (cut / WEIGHTS).unlink()
    (cut / "adapter_model.bin").write_bytes(b"PK\x03\x04")
    wrong = {
        tmp_path / "nothing": "does not exist",
        tmp_path / "empty": f"has no {CONFIG}",
        adapter(tmp_path / "cut", '{"r":'): f"has no {CONFIG} that can be read",
        adapter(tmp_path / "list", "[]"): f"has no {CONFIG} that can be read: it is no JSON object",
        without: "has none of adapter_model.safetensors, adapter_model.bin, adapter_model.pt",
        cut: "has a file adapter_model.bin that was not fetched or copied to the end",
        adapter(tmp_path / "nothing in it", None, {}): f"has no tensors in {WEIGHTS}",
    }
    for path, said in wrong.items():
        assert refusal(path) == said


@pytest.mark.parametrize("left", [0, 4, 300, -1])
def test_weights_that_are_cut_off_are_refused(tmp_path: Path, left: int) -> None:
    path = adapter(tmp_path / "a")
    content = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(content[:left])
    assert refusal(path).startswith("has weights that are not whole: ")
    (path / WEIGHTS).write_bytes(content)
    assert check_adapter("fr", path) == 8


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"r": 0}, "has r: 0 in adapter_config.json, which must be a whole number above 0"),
        ({"r": "8"}, 'has r: "8" in adapter_config.json, which must be a whole number above 0'),
        ({"r": True}, "has r: true"),
        ({"r": None}, "has r: null"),
        ({"lora_alpha": None}, "has lora_alpha: null in adapter_config.json, which must be a number"),
        ({"lora_alpha": "16"}, 'has lora_alpha: "16"'),
        ({"lora_alpha": math.nan}, "has lora_alpha: NaN"),
        ({"use_dora": True}, "has use_dora: true in adapter_config.json, which must be absent"),
        ({"bias": "all"}, 'has bias: "all"'),
        ({"modules_to_save": ["lm_head"]}, 'has modules_to_save: ["lm_head"]'),
        ({"init_lora_weights": "pissa"}, 'has init_lora_weights: "pissa"'),
        ({"rank_pattern": {"q_proj": 0}}, 'has rank_pattern: {"q_proj": 0}'),
        ({"rank_pattern": {"(": 8}}, "has rank_pattern"),
        ({"alpha_pattern": ["q_proj"]}, "has alpha_pattern"),
        ({"peft_type": "IA3"}, 'has an adapter of type "IA3", and vLLM loads LoRA alone'),
    ],
)
def test_settings_that_vllm_does_not_load_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    assert refusal(adapter(tmp_path / "a", {**FINE, **changed})).startswith(said)


def test_settings_that_are_missing_are_named(tmp_path: Path) -> None:
    assert refusal(adapter(tmp_path / "a", {"r": 8})) == (
        "has no lora_alpha and no target_modules in adapter_config.json"
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"use_dora": False, "modules_to_save": None, "init_lora_weights": True, "use_rslora": True},
        {"modules_to_save": ["score"], "rank_pattern": {}, "alpha_pattern": {"q_proj": 4.5}, "lora_alpha": 0.5},
        {"init_lora_weights": "gaussian", "layer_replication": None, "target_modules": "all-linear"},
        {"peft_type": None, "lora_alpha": 10**400},
    ],
)
def test_what_vllm_loads_is_taken(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert check_adapter("fr", adapter(tmp_path / "a", {**FINE, **changed}), base(tmp_path / "base")) == 8


def test_tensors_that_are_none_of_an_adapters_are_refused(tmp_path: Path) -> None:
    whole = pair(f"model.{Q_PROJ}", (8, 32), (64, 8))
    name = f"base_model.model.model.{Q_PROJ}"
    wrong = {
        f"has a tensor {name}.lora_magnitude_vector, which": {**whole, f"{name}.lora_magnitude_vector": (64,)},
        f"has a tensor {name}.lora_A.default.weight, which": {**whole, f"{name}.lora_A.default.weight": (8, 32)},
        f"has no lora_B for the module model.{Q_PROJ}": {f"{name}.lora_A.weight": (8, 32)},
        "has tensors of shapes 4 x 32 and 64 x 4 for": pair(f"model.{Q_PROJ}", (4, 32), (64, 4)),
    }
    for number, (said, shapes) in enumerate(wrong.items()):
        assert refusal(adapter(tmp_path / str(number), None, shapes)).startswith(said)


def test_tensors_that_do_not_fit_the_base_are_refused(tmp_path: Path) -> None:
    of = base(tmp_path / "base")
    wrong = {
        f"changes model.{Q_PROJ} as a weight of 64 x 16, which in the base is one of 64 x 32: it was": pair(
            f"model.{Q_PROJ}", (8, 16), (64, 8)
        ),
        f"changes model.{Q_PROJ} as a weight of 128 x 32, which": pair(f"model.{Q_PROJ}", (8, 32), (128, 8)),
        "changes model.layers.9.self_attn.q_proj, and the base has no layers.9: it was trained": {
            **pair(f"model.{Q_PROJ}", (8, 32), (64, 8)),
            **pair("model.layers.9.self_attn.q_proj", (8, 32), (64, 8)),
        },
        "changes transformer.attention and other modules, of which the base has none": pair(
            "transformer.attention", (8, 32), (64, 8)
        ),
        "changes model.embed_tokens as a weight of 90 x 32, which in the base is one of 100 x 32": {
            "base_model.model.model.embed_tokens.lora_embedding_A": (8, 90),
            "base_model.model.model.embed_tokens.lora_embedding_B": (32, 8),
        },
    }
    for number, (said, shapes) in enumerate(wrong.items()):
        path = adapter(tmp_path / str(number), None, shapes)
        assert refusal(path, of).startswith(said)
        assert check_adapter("fr", path) == 8, "without its base, that is not known"


@pytest.mark.parametrize(
    "shapes",
    [
        # Wrapped in another way, as models of pictures and text are.
        pair(f"model.language_model.{Q_PROJ}", (8, 32), (64, 8)),
        pair(Q_PROJ, (8, 32), (64, 8), prefix=""),
        # What is tied to the embedding is left out in checkpoints.
        pair("lm_head", (8, 32), (100, 8)),
        # Experts are stored in several ways.
        pair("model.layers.0.mlp.experts", (64, 32), (96, 64)),
        pair("model.layers.0.mlp.experts.7.up_proj", (4, 32), (96, 4)),
        {
            "base_model.model.model.embed_tokens.lora_embedding_A": (8, 100),
            "base_model.model.model.embed_tokens.lora_embedding_B": (32, 8),
            "base_model.model.model.embed_tokens.base_layer.weight": (100, 32),
        },
    ],
)
def test_what_may_fit_is_left_to_vllm(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    assert check_adapter("fr", adapter(tmp_path / "a", None, shapes), base(tmp_path / "base")) == 8


def test_bases_that_do_not_tell(tmp_path: Path) -> None:
    other = adapter(tmp_path / "a", None, pair(f"model.{Q_PROJ}", (8, 16), (64, 8)))
    quantized = base(tmp_path / "packed", {f"model.{Q_PROJ}.qweight": (4, 64)}, "I32")
    assert check_adapter("fr", other, quantized) == 8
    turned = adapter(tmp_path / "turned", {**FINE, "fan_in_fan_out": True}, pair(f"model.{Q_PROJ}", (8, 64), (32, 8)))
    assert check_adapter("fr", turned, base(tmp_path / "base")) == 8
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "pytorch_model.bin").touch()
    assert read_base(tmp_path / "torch") is None
    assert read_base(tmp_path / "nothing") is None


def test_changed_files_are_read_again_and_others_are_not(tmp_path: Path) -> None:
    path, of = adapter(tmp_path / "a"), base(tmp_path / "base")
    assert check_adapter("fr", path, of) == 8
    assert read_base(tmp_path / "base") is of
    tensors(tmp_path / "base" / "model.safetensors", {f"model.{Q_PROJ}.weight": (32, 32)})
    assert "which in the base is one of 32 x 32" in refusal(path, read_base(tmp_path / "base"))
    shutil.rmtree(path)
    assert refusal(path, of) == "does not exist"
