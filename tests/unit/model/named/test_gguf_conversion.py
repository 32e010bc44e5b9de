"""A GGUF file of the Llama family becomes a folder that transformers and vLLM load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dynamo_local.model.named.gguf_conversion import convert, in_bfloat16, in_halves
from tests.unit.model.named.tiny_package import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, SPECIAL, TEMPLATE, write_gguf


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The converted folder, and the weights by their names in the GGUF file."""
    folder = tmp_path_factory.mktemp("converted")
    weights = write_gguf(folder / "tiny.gguf")
    convert(folder / "tiny.gguf", folder)
    return folder, weights


@pytest.fixture(scope="module")
def folder(made: tuple[Path, dict[str, Any]]) -> Path:
    return made[0]


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_the_configuration_has_the_file_s_sizes(folder: Path) -> None:
    config = read(folder / "config.json")
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [config[key] for key in sizes] == [HIDDEN, INNER, LAYERS, HEADS, KV_HEADS]
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (config["max_position_embeddings"], config["rope_theta"]) == (128, 10000.0)
    assert config["dtype"] == "bfloat16"


def test_an_answer_ends_with_the_token_that_ends_a_message(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    assert read(folder / "config.json")["eos_token_id"] == end
    assert read(folder / "generation_config.json")["eos_token_id"] == end
    assert read(folder / "tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_the_tokenizer_merges_and_keeps_special_tokens_and_the_template(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab a").ids == [1, 5, 7, 3]
    assert tokenizer.encode("11").tokens == ["1", "1"]
    assert tokenizer.decode([5, 7, 3]) == "ab a"
    for token in SPECIAL:
        assert len(tokenizer.encode(token).ids) == 1
    assert read(folder / "tokenizer_config.json")["chat_template"] == TEMPLATE


def test_weights_keep_their_values_under_hugging_face_s_names(made: tuple[Path, dict[str, Any]]) -> None:
    folder, weights = made
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == len(weights)
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("model.layers.1.self_attn.v_proj", "blk.1.attn_v"),
        ("model.layers.1.self_attn.o_proj", "blk.1.attn_output"),
        ("model.layers.1.mlp.gate_proj", "blk.1.ffn_gate"),
        ("model.layers.1.mlp.down_proj", "blk.1.ffn_down"),
    ):
        expected = torch.tensor(weights[f"{theirs}.weight"]).to(torch.bfloat16)
        assert torch.equal(tensors[f"{ours}.weight"], expected), ours
    unpacked = tensors["model.layers.0.mlp.up_proj.weight"].float().numpy()
    # Four bits: sixteen steps from the least to the greatest of 32 values.
    assert np.abs(unpacked - weights["blk.0.ffn_up.weight"]).max() < 0.3


def test_queries_and_keys_are_turned_by_their_own_number_of_heads(made: tuple[Path, dict[str, Any]]) -> None:
    folder, weights = made
    tensors = load_file(folder / "model.safetensors")
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        values: Any = weights[f"blk.1.attn_{part}.weight"]
        expected = torch.tensor(in_halves(values, heads)).to(torch.bfloat16)
        assert torch.equal(tensors[f"model.layers.1.self_attn.{part}_proj.weight"], expected)


def test_rotary_pairs_come_to_stand_in_the_halves_of_their_head() -> None:
    rows: Any = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert in_halves(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    # 1 + 2**-8 and 1 + 3 * 2**-8 lie in the middle between two values.
    values = np.array([0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.14159, 1e-30, 65504.0, 1e38], dtype=np.float32)
    values = np.concatenate([values, np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)])
    expected = torch.tensor(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (in_bfloat16(values) == expected).all()


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture="phi3")
    with pytest.raises(ValueError, match="no Llama"):
        convert(tmp_path / "tiny.gguf", tmp_path)
