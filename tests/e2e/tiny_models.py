"""Tiny models with random weights, one of each family of caches that vLLM knows. Nothing is downloaded.

All have the vocabulary and the tokenizer of the model `random`, and are made by transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.model.named.random_model import random_model

WINDOW = 64
"""Of sliding-window attention, in tokens."""

_SPREAD = 0.12
"""Standard deviation of the weights: at transformers' own (0.02) a tiny model says the same whatever it is asked."""

_ATTENTION: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}

_NO_SCAN = "'_OpNamespace' '_C' object has no attribute 'selective_scan_fwd'"


@dataclass(frozen=True)
class Family:
    """A kind of model. `settings` are those of transformers' configuration of this `model_type`."""

    model_type: str
    settings: Mapping[str, Any]
    lends: bool = False
    """Its KV blocks can be read by others."""
    options: tuple[str, ...] = ("dtype=float32",)
    """Of vLLM, without which it does not run on a CPU, or not exactly."""
    fails: str | None = None
    """What vLLM says of it on a CPU, if it does not run."""
    exact: bool = True
    """Whether vLLM itself computes the same, but for rounding in float32, of a context as a prompt and step by step."""


FAMILIES: Mapping[str, Family] = {
    "full attention": Family("llama", _ATTENTION, lends=True),
    "mixture of experts": Family(
        "mixtral", {**_ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2}, lends=True
    ),
    "latent attention": Family(
        "deepseek_v2",
        {
            **_ATTENTION,
            "head_dim": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
        },
        # On a CPU, vLLM turns prefix caching off for these. And log-probabilities of its own, in one engine, are apart
        # by 0.5 to 1.7 when a context is computed as a prompt.
        exact=False,
    ),
    "sliding window": Family("mistral", {**_ATTENTION, "sliding_window": WINDOW}),
    "sliding and full": Family(
        "gemma3_text",
        {
            **_ATTENTION,
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "mamba": Family(
        "mamba", {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "conv_kernel": 4}, fails=_NO_SCAN
    ),
    "mamba 2": Family(
        "mamba2",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 1,
        },
    ),
    "hybrid with mamba": Family(
        "jamba",
        {
            **{name: value for name, value in _ATTENTION.items() if name != "head_dim"},
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 16,
        },
        fails=_NO_SCAN,
    ),
    "hybrid with mamba 2": Family(
        "granitemoehybrid",
        {
            **{name: value for name, value in _ATTENTION.items() if name != "head_dim"},
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_expand": 2,
        },
        # With it, vLLM: "IndexError: index 1 is out of bounds for dimension 0 with size 1".
        options=("dtype=float32", "enable-prefix-caching=false"),
    ),
    "hybrid with linear attention": Family(
        "qwen3_next",
        {
            **_ATTENTION,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        # vLLM: "CPU GDN attention requires BF16".
        options=("dtype=bfloat16",),
        exact=False,
    ),
    "hybrid with short convolutions": Family(
        "lfm2",
        {
            **{name: value for name, value in _ATTENTION.items() if name != "head_dim"},
            "layer_types": ["conv", "full_attention"],
            # As published models have them; transformers does without.
            "conv_dim": 128,
            "block_dim": 128,
            "block_ff_dim": 128,
        },
        # On a CPU, log-probabilities of one engine are apart by 0.04 to 0.14 when a context is computed as a prompt.
        exact=False,
    ),
}


def make_another(folder: Path) -> Path:
    """Write `random` with its layers in reverse order into `folder`, which does not exist yet: a model that says other
    things. Returns it. PyTorch is not needed, and no engine could be forked from a process in which it has computed."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(random_model(), folder)
    weights = load_file(folder / "model.safetensors")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]

    def moved(name: str) -> str:
        """Name of the weight whose place it takes."""
        prefix, dot, rest = name.partition(".layers.")
        number, _, kind = rest.partition(".")
        return f"{prefix}{dot}{layers - 1 - int(number)}.{kind}" if dot else name

    renamed = {moved(name): weight for name, weight in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_model(family: Family, folder: Path) -> Path:
    """Write a model of this family into `folder`, which does not exist yet. Returns it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(random_model(), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tokens = json.loads((folder / "generation_config.json").read_text())
    vocabulary = json.loads((random_model() / "config.json").read_text())["vocab_size"]
    config = AutoConfig.for_model(
        family.model_type,
        **family.settings,
        **tokens,
        vocab_size=vocabulary,
        initializer_range=_SPREAD,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(tokens))
    return folder
