"""Figures of models of each family, from the settings that their published configurations have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.sizing.architecture import architecture_facts
from dynamo_local.core.sizing.model_facts import ModelFacts

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "vocab_size": 128256,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "sliding_window": 32768, "use_sliding_window": False,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 40960, "sliding_window": None,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128, "max_position_embeddings": 40960,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "head_dim": 256,
    "num_key_value_heads": 4, "sliding_window": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3", "vision_config": {}, "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "max_position_embeddings": 131072,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 32768,
}  # fmt: skip
MIXTRAL = MISTRAL | {"model_type": "mixtral", "num_local_experts": 8, "sliding_window": None}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "n_routed_experts": 256, "max_position_embeddings": 163840, "auto_map": {"AutoConfig": "configuration.X"},
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
PHI3 = {
    "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "sliding_window": 262144, "max_position_embeddings": 131072,
    "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
}  # fmt: skip
FALCON = {
    "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "multi_query": True, "new_decoder_architecture": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
MAMBA = {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16}
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
    "head_dim": 256, "num_key_value_heads": 2, "num_experts": 512, "linear_num_value_heads": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
JAMBA = {
    "model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attn_layer_period": 8, "mamba_d_state": 16, "num_experts": 16,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "is_encoder_decoder": True, "d_model": 384, "num_hidden_layers": 4,
    "decoder_layers": 4, "decoder_attention_heads": 6, "max_target_positions": 448,
}  # fmt: skip

KV_BYTES: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama": (LLAMA, 131072),  # 2 x 32 x 8 x 128 x 2 bytes
    "qwen2": (QWEN2, 12288),
    "qwen3": (QWEN3, 114688),
    "qwen3 moe": (QWEN3_MOE, 98304),
    "gemma 2": (GEMMA2, 106496),
    "gemma 3": (GEMMA3, 139264),
    "mistral": (MISTRAL, 131072),
    "mixtral": (MIXTRAL, 131072),
    "deepseek v3": (DEEPSEEK_V3, 70272),  # 61 x (512 + 64) x 2 bytes
    "phi 3": (PHI3, 393216),
    "falcon 7b": (FALCON, 8192),  # one head for all
    "gpt-2": (GPT2, 36864),
    "whisper": (WHISPER, 6144),
    "qwen3 next": (QWEN3_NEXT, 2048),  # the one layer with attention
    "mamba": (MAMBA, None),
    "jamba": (JAMBA, None),  # the configuration does not list its layers
    "nothing known": ({}, None),
}


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_bytes_of_a_token_in_16_bits(name: str) -> None:
    config, expected = KV_BYTES[name]
    assert architecture_facts(config).kv_bytes_per_token(2) == expected


MAX_POSITIONS: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama 3: the length includes the factor": (LLAMA, 131072),
    "gemma 3: the length includes the factor": (GEMMA3, 131072),
    "deepseek: yarn is included": (DEEPSEEK_V3, 163840),
    "phi 3": (PHI3, 131072),
    "linear scaling": (MISTRAL | {"rope_scaling": {"type": "linear", "factor": 4.0}}, 131072),
    "scaling for each kind of layer": (
        MISTRAL | {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}},
        65536,
    ),
    "gpt-2": (GPT2, 1024),
    "whisper": (WHISPER, 448),
    "unknown": (FALCON, None),
}


@pytest.mark.parametrize("name", MAX_POSITIONS)
def test_longest_context(name: str) -> None:
    config, expected = MAX_POSITIONS[name]
    assert architecture_facts(config).max_position == expected


def test_windows_bound_the_cache_of_a_long_context() -> None:
    facts = architecture_facts(GEMMA3)
    # 34 layers: every sixth keeps all tokens, the others the last 1024; 2 x 4 x 256 elements each.
    assert facts.kv_bytes(10_000, 2) == (5 * 10_000 + 29 * 1024) * 2048 * 2
    assert facts.sliding_window == 1024
    assert architecture_facts(QWEN2).sliding_window is None


@pytest.mark.parametrize(("config", "experts"), [(QWEN3_MOE, 128), (MIXTRAL, 8), (DEEPSEEK_V3, 256), (LLAMA, None)])
def test_experts(config: dict[str, Any], experts: int | None) -> None:
    facts = architecture_facts(config)
    assert (facts.is_moe, facts.experts) == (experts is not None, experts)


def test_kinds_of_models() -> None:
    assert architecture_facts(MAMBA).has_recurrent_state
    assert architecture_facts(QWEN3_NEXT).has_recurrent_state
    assert architecture_facts(JAMBA).has_recurrent_state
    assert not architecture_facts(LLAMA).has_recurrent_state
    assert architecture_facts(DEEPSEEK_V3).is_mla
    assert architecture_facts(DEEPSEEK_V3).needs_remote_code
    assert architecture_facts(DEEPSEEK_V3).quantization == "fp8"
    assert architecture_facts(WHISPER).is_encoder_decoder
    assert architecture_facts(GEMMA3).is_multimodal
    assert architecture_facts(GEMMA3).text_model_type == "gemma3_text"
    assert architecture_facts(LLAMA).dtype == "bfloat16"


sizes = st.integers(1, 200)


@settings(max_examples=40)
@given(layers=sizes, heads=sizes, kv_heads=sizes, head_dim=sizes, window=st.none() | sizes, tokens=sizes)
def test_the_cache_of_plain_attention_is_keys_and_values_of_all_layers(
    layers: int, heads: int, kv_heads: int, head_dim: int, window: int | None, tokens: int
) -> None:
    facts = architecture_facts(
        {
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "sliding_window": window,
        }
    )
    per_token = facts.kv_bytes_per_token(2)
    assert per_token == 2 * layers * kv_heads * head_dim * 2
    assert facts.kv_bytes(tokens, 2) == min(tokens, window or tokens) * per_token


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
setting_names = st.sampled_from(
    sorted({key for config, _ in KV_BYTES.values() for key in config} | {"rope_parameters", "quantization_config"})
)


@settings(max_examples=60)
@given(st.dictionaries(setting_names, json_values, max_size=12))
def test_no_configuration_is_too_odd_to_be_read(config: dict[str, Any]) -> None:
    facts = architecture_facts(config)
    figures = (facts.layers, facts.heads, facts.kv_heads, facts.head_dim, facts.max_position, facts.experts)
    assert all(figure is None or figure > 0 for figure in figures)
    assert facts.kv_bytes_per_token(2) != 0


def test_unknown_is_not_zero() -> None:
    facts = ModelFacts()
    assert facts.kv_bytes_per_token(2) is None
    assert facts.kv_bytes(100, 2) is None
    assert facts.weight_bytes is None
