"""Folders with LoRA adapters for tests that load none: their tensors are zeros."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dynamo_local.model.adapter import CONFIG

WEIGHTS = "adapter_model.safetensors"
Q_PROJ = "layers.0.self_attn.q_proj"
FINE: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none", "peft_type": "LORA"}


def tensors(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> Path:
    """A safetensors file, all of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return path


def pair(module: str, a: tuple[int, ...], b: tuple[int, ...], prefix: str = "base_model.model.") -> dict[str, Any]:
    return {f"{prefix}{module}.lora_A.weight": a, f"{prefix}{module}.lora_B.weight": b}


def adapter(path: Path, config: object = None, shapes: dict[str, tuple[int, ...]] | None = None, rank: int = 8) -> Path:
    """By default, of a projection from 32 to 64."""
    path.mkdir()
    config = {**FINE, "r": rank} if config is None else config
    (path / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    tensors(path / WEIGHTS, pair(f"model.{Q_PROJ}", (rank, 32), (64, rank)) if shapes is None else shapes)
    return path
