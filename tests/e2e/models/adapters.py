"""LoRA adapters for the model `random`, with random weights that are strong enough to change every answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 8
_LAYERS, _HIDDEN = 4, 256
_OUT = {"q_proj": 256, "v_proj": 128}
_SCALE = 0.15


def make_adapter(folder: Path, seed: int, within: str = "model.", **settings: Any) -> Path:
    """As `peft` writes them. `within`: what the names of the model's modules begin with. `settings`: changed ones."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    weights = {}
    for layer in range(_LAYERS):
        for name, out in _OUT.items():
            prefix = f"base_model.model.{within}layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, _HIDDEN)), ("lora_B", (out, RANK))):
                weights[f"{prefix}.{part}.weight"] = draw.normal(0, _SCALE, shape).astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(_OUT), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder
