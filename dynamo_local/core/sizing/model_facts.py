"""What a model's own files say of it, before it is loaded. Whatever they do not say is None, which is not zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Size in bytes of one element of each data type that a KV cache or a model may have."""


@dataclass(frozen=True)
class AttentionLayers:
    """Layers of one kind, by what they keep in the KV cache.

    `elements`: numbers that one such layer keeps for a token; `window`: of how many tokens, None: of all.
    """

    count: int
    elements: int
    window: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Figures of one model. Read by `dynamo_local.model.facts.read_facts`."""

    architecture: str | None = None
    """The first of `architectures` in config.json, such as "LlamaForCausalLM"."""
    model_type: str | None = None
    """`model_type` of config.json, such as "llama"; of the whole model where it has parts."""
    text_model_type: str | None = None
    """`model_type` of the language model inside; equal to `model_type` where the model has no parts."""
    parameters: int | None = None
    """Number of weights. Unknown where several are packed into one element, and without safetensors."""
    weight_bytes: int | None = None
    """Bytes of the weights that vLLM loads, as stored."""
    weight_dtype: str | None = None
    """Data type of most of the weights as stored, such as "bfloat16"."""
    dtype: str | None = None
    """Data type that the configuration asks for; where it does not, that of the weights."""
    layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    heads: int | None = None
    """Attention heads of a layer: tensor parallelism must divide this number."""
    kv_heads: int | None = None
    """Key and value heads of a layer. With latent attention (`is_mla`) the cache does not depend on it."""
    head_dim: int | None = None
    max_position: int | None = None
    """Longest context in tokens that the configuration allows, prompt and output together."""
    longest_given: int | None = None
    """Longest context in tokens that vLLM takes from `max-model-len`: `max_position`, or more where config.json has a
    larger `model_max_length`."""
    sliding_window: int | None = None
    """Window in tokens of the layers that have one."""
    attention: tuple[AttentionLayers, ...] | None = None
    """Layers with a KV cache. Empty: the model has none."""
    is_mla: bool = False
    """Whether the cache holds one latent vector for a token in place of keys and values (DeepSeek)."""
    has_recurrent_state: bool = False
    """Whether some layers keep a state of fixed size for each request (Mamba, linear attention)."""
    is_encoder_decoder: bool = False
    is_encoder: bool = False
    """Whether every layer sees the whole text at once, so that there is no KV cache (BERT)."""
    pools: bool = False
    """Whether vLLM takes it for a pooling model: one that answers with embeddings, classes or scores, not tokens."""
    is_multimodal: bool = False
    is_moe: bool = False
    experts: int | None = None
    """Experts of a layer; None without experts or where unknown (`is_moe` tells which)."""
    quantization: str | None = None
    """Method by which the weights are quantized, such as "gptq", "fp8"; None: they are not."""
    quantization_bits: int | None = None
    chat_template: str | None = None
    """The chat template (Jinja) that requests without a name for one use."""
    has_tokenizer: bool = False
    needs_remote_code: bool = False
    """Whether the model is loaded by Python code of its own (`auto_map`), as vLLM and Transformers have none for it.
    vLLM runs that code only with `trust-remote-code`."""

    def kv_bytes_per_token(self, dtype_bytes: int) -> int | None:
        """Bytes of KV cache for one token in all attention layers, on one device without tensor parallelism.

        Layers with a window are counted like the others: an upper bound once the context is longer than the window.
        None if unknown or if the model has no attention; a recurrent state is not part of it.
        """
        if not self.attention:
            return None
        return dtype_bytes * sum(group.count * group.elements for group in self.attention)

    def kv_bytes(self, tokens: int, dtype_bytes: int) -> int | None:
        """Bytes of KV cache for a context of so many tokens, with what falls out of windows left out. A lower bound:
        blocks are whole. None as for `kv_bytes_per_token`."""
        if not self.attention:
            return None
        kept = (group.count * group.elements * min(tokens, group.window or tokens) for group in self.attention)
        return dtype_bytes * sum(kept)


# Whether a model is served as a pooling model: embeddings, classes, scores.

_ENDS = (
    "ForSequenceClassification", "ForTokenClassification", "ForTextEncoding", "ForRewardModeling", "Model",
)  # fmt: skip
"""Ends of the names of architectures that vLLM makes pooling models of, if it has no code for just these. Its list is
`_SUFFIX_TO_DEFAULTS` in vllm/config/model.py."""
_ENDS_OF_GENERATION = ("ChatModel", "LMHeadModel")


def pools_by_name(architecture: str | None, pooling: Collection[str], known: Collection[str]) -> bool:
    """Tell by the name of the architecture. `known` are those that vLLM has code for, `pooling` those among them that
    do not generate."""
    if architecture is None or architecture in known:
        return architecture in pooling
    return architecture.endswith(_ENDS) and not architecture.endswith(_ENDS_OF_GENERATION)


def is_pooling(facts: ModelFacts, given: Mapping[str, Any]) -> bool:
    """Whether vLLM serves the model so, with the arguments that the user gives."""
    runner, convert = given.get("runner"), given.get("convert")
    if runner in ("generate", "pooling"):
        return bool(runner == "pooling")
    return convert in ("embed", "classify") or facts.pools
