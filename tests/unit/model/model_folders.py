"""Folders of small models: real files of the real formats, without meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 256,
    "dtype": "float32",
}
TOKENIZER_CONFIG = {"chat_template": "{{ messages }}"}


def safetensors(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """A safetensors file of zeros. `tensors`: name to data type, shape and size in bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(at)


WEIGHTS = safetensors({"embed": ("F32", [256, 64], 65536), "norm": ("F32", [64], 256)})


def model_files(config: dict[str, Any] | None = None) -> dict[str, bytes]:
    """Files of a small whole model, by name."""
    return {
        "config.json": json.dumps(CONFIG if config is None else config).encode(),
        "model.safetensors": WEIGHTS,
        "tokenizer.json": b"{}",
        "tokenizer_config.json": json.dumps(TOKENIZER_CONFIG).encode(),
        "README.md": b"words\n",
    }


def write_model(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (model_files() if files is None else files).items():
        (folder / name).write_bytes(content)
    return folder
