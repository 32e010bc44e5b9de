"""The figures of a model's architecture, from the JSON of its config.json.

The names of the settings and their order are those of vLLM's `ModelArchConfigConvertorBase` and
`_get_and_verify_max_len`. The size of a KV cache for one token of one layer is 2 x kv_heads x head_dim elements
(a key and a value for each head: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention"); with multi-head latent attention it is kv_lora_rank + qk_rope_head_dim elements (DeepSeek-AI 2024,
"DeepSeek-V2", section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamo_local.core.sizing.model_facts import AttentionLayers, ModelFacts

Config = Mapping[str, Any]

_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_PERCEPTION_PARTS = ("vision_config", "audio_config", "vision_tower_config", "audio_encoder_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM = ("head_dim", "hidden_size_per_head")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
_LENGTHENED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default")
"""Kinds of RoPE scaling whose factor the configured length includes, or that have none."""

_FULL_ATTENTION_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}
"""Which layers attend to everything, by model type, where the configuration leaves it to Transformers' defaults."""

_ENCODER_TYPES = frozenset(
    {"bert", "camembert", "distilbert", "gte", "modernbert", "new", "nomic_bert", "roberta", "xlm-roberta"}
)
"""Model types whose attention goes both ways."""

_RECURRENT_TYPES = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv7"})
"""Model types without any attention layer."""
_HYBRID_KEYS = (
    "mamba_d_state", "ssm_state_size", "mamba_n_heads", "linear_num_value_heads", "linear_attn_config",
    "hybrid_override_pattern", "attn_layer_period",
)  # fmt: skip
_ATTENTION_LAYER_NAMES = frozenset({"attention", "full_attention", "global_attention", "hybrid"})
_WINDOW_LAYER_NAMES = frozenset({"sliding_attention", "local_attention", "chunked_attention"})
_RECURRENT_LAYER_NAMES = frozenset({"mamba", "mamba2", "linear_attention", "recurrent", "conv", "ssm", "moe", "mlp"})


def architecture_facts(config: Config) -> ModelFacts:
    """The facts that config.json tells. Sizes of weights, tokenizer and template are left unknown."""
    text = language_part(config)
    heads = _number(text, _HEADS)
    layers = _number(text, _LAYERS)
    is_mla = _number(text, ("kv_lora_rank",)) is not None and _number(text, ("qk_rope_head_dim",)) is not None
    groups = _attention(text, layers, is_mla)
    moe_experts = _experts(text)
    max_position = _max_position(config, text)
    method, bits = _quantization(config, text)
    return ModelFacts(
        architecture=next(iter(architectures(config)), None),
        model_type=_text(config, "model_type"),
        text_model_type=_text(text, "model_type"),
        dtype=configured_dtype(config, text),
        layers=layers,
        hidden_size=_number(text, _HIDDEN),
        vocab_size=_number(text, ("vocab_size",)),
        heads=heads,
        kv_heads=_kv_heads(text),
        head_dim=_head_dim(text),
        max_position=max_position,
        longest_given=None if max_position is None else max(max_position, _number(config, ("model_max_length",)) or 0),
        sliding_window=_window(text),
        attention=groups,
        is_mla=is_mla,
        has_recurrent_state=_is_recurrent(text) or _is_hybrid(text),
        is_encoder_decoder=config.get("is_encoder_decoder") is True,
        is_encoder=_text(config, "model_type") in _ENCODER_TYPES,
        is_multimodal=any(isinstance(config.get(part), Mapping) for part in (*_PERCEPTION_PARTS, "thinker_config")),
        is_moe=moe_experts is not None,
        experts=moe_experts,
        quantization=method,
        quantization_bits=bits,
        needs_remote_code=bool(config.get("auto_map")),
    )


def architectures(config: Config) -> tuple[str, ...]:
    """The names under `architectures`; none if the configuration has no such list."""
    names = config.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def language_part(config: Config) -> Config:
    """The configuration of the language model within that of a model with parts; else the configuration itself."""
    for part in _LANGUAGE_PARTS:
        nested = config.get(part)
        if isinstance(nested, Mapping):
            return language_part(nested)
    return config


def configured_dtype(config: Config, text: Config) -> str | None:
    """`dtype` (called `torch_dtype` before Transformers 5) of the model or of its language part."""
    for part in (config, text):
        name = _text(part, "dtype") or _text(part, "torch_dtype")
        if name:
            return name.removeprefix("torch.")
    return None


def _attention(text: Config, layers: int | None, is_mla: bool) -> tuple[AttentionLayers, ...] | None:
    """Layers with a KV cache; None where the configuration does not tell which they are or how large."""
    if _is_recurrent(text) or _text(text, "model_type") in _ENCODER_TYPES:
        return ()
    elements = _elements(text, is_mla)
    kinds = _layer_kinds(text, layers)
    if elements is None or kinds is None:
        return None
    full, windowed = kinds
    groups = (AttentionLayers(full, elements), AttentionLayers(windowed, elements, _window(text)))
    return tuple(group for group in groups if group.count)


def _elements(text: Config, is_mla: bool) -> int | None:
    """Numbers that one layer keeps for a token."""
    if is_mla:
        return int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    kv_heads, head_dim = _kv_heads(text), _head_dim(text)
    return 2 * kv_heads * head_dim if kv_heads and head_dim else None


def _layer_kinds(text: Config, layers: int | None) -> tuple[int, int] | None:
    """How many layers attend to everything, and how many to a window. None where that is not known."""
    named = _named_layers(text)
    if named is not None:
        return _counted(named)
    if _is_hybrid(text) or layers is None:
        return None
    if _window(text) is None:
        return layers, 0
    usual = _FULL_ATTENTION_EVERY.get(_text(text, "model_type") or "")
    period = _number(text, ("sliding_window_pattern", "_sliding_window_pattern")) or usual
    full = layers // period if period else 0
    return full, layers - full


def _named_layers(text: Config) -> Sequence[str] | None:
    for key in ("layer_types", "layers_block_type"):
        names = text.get(key)
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return names
    return None


def _counted(names: Sequence[str]) -> tuple[int, int] | None:
    known = _ATTENTION_LAYER_NAMES | _WINDOW_LAYER_NAMES | _RECURRENT_LAYER_NAMES
    if not known.issuperset(names):
        return None
    return sum(name in _ATTENTION_LAYER_NAMES for name in names), sum(name in _WINDOW_LAYER_NAMES for name in names)


def _is_recurrent(text: Config) -> bool:
    return _text(text, "model_type") in _RECURRENT_TYPES


def _is_hybrid(text: Config) -> bool:
    named = _named_layers(text) or ()
    return any(text.get(key) for key in _HYBRID_KEYS) or any(
        name in _RECURRENT_LAYER_NAMES - {"moe", "mlp"} for name in named
    )


def _kv_heads(text: Config) -> int | None:
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        # Falcon-7B and GPT-BigCode: one head for all, unless the number is given.
        return _number(text, ("multi_query_group_num",)) or 1
    return _number(text, _KV_HEADS) or _number(text, _HEADS)


def _head_dim(text: Config) -> int | None:
    given = _number(text, _HEAD_DIM)
    hidden, heads = _number(text, _HIDDEN), _number(text, _HEADS)
    if given or not hidden or not heads:
        return given
    return hidden // heads


def _experts(text: Config) -> int | None:
    """Experts of a layer where there are several; some configurations of dense models say 0 or 1."""
    for key in _EXPERTS:
        value = text.get(key)
        counts = value if isinstance(value, list) else [value]
        count = max((n for n in counts if isinstance(n, int) and not isinstance(n, bool)), default=0)
        if count > 1:
            return count
    return None


def _window(text: Config) -> int | None:
    if text.get("use_sliding_window") is False:
        return None
    return _number(text, ("sliding_window",))


def _max_position(config: Config, text: Config) -> int | None:
    """Smallest of the lengths given, times the factor of RoPE scaling where the length does not include it."""
    lengths = [length for key in _LENGTHS if (length := _number(text, (key,)))]
    if not lengths:
        return None
    if "gemma3" in (_text(config, "model_type") or ""):
        return min(lengths)
    factor = max((scaling for rope in _ropes(text) if (scaling := _lengthening(rope))), default=1.0)
    return int(min(lengths) * factor)


def _ropes(text: Config) -> Iterator[Config]:
    """The settings of rotary embeddings: one for the model, or one for each kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if isinstance(rope, Mapping):
            nested = [value for value in rope.values() if isinstance(value, Mapping)]
            yield from nested or [rope]


def _lengthening(rope: Config) -> float | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = rope.get("factor")
    if kind in _LENGTHENED_ALREADY or not isinstance(factor, int | float) or not 1 <= factor < float("inf"):
        return None
    return float(factor)


def _quantization(config: Config, text: Config) -> tuple[str | None, int | None]:
    for part in (config, text):
        for key in ("quantization_config", "compression_config"):
            settings = part.get(key)
            if isinstance(settings, Mapping):
                return _method(settings), _number(settings, ("bits", "w_bit", "num_bits"))
    return None, None


def _method(settings: Config) -> str:
    """Name of the method as vLLM spells it; "unknown" where it has none."""
    producer, of_modelopt = settings.get("producer"), settings.get("quantization")
    if isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        algorithm = _text(of_modelopt, "quant_algo") if isinstance(of_modelopt, Mapping) else None
        return "modelopt_fp4" if algorithm and algorithm.upper() == "NVFP4" else "modelopt"
    return (_text(settings, "quant_method") or "unknown").lower().replace("compressed_tensors", "compressed-tensors")


def _number(part: Config, keys: Sequence[str]) -> int | None:
    """The first of the settings that is a positive whole number."""
    for key in keys:
        value = part.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _text(part: Config, key: str) -> str | None:
    value = part.get(key)
    return value if isinstance(value, str) and value else None
