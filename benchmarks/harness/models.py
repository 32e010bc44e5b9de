"""The models that are measured: `random`, one heavy enough to resemble real use, and a real one, `smollm2`.

The heavy one is made here by the same recipe (a Llama with seeded random weights, the same tokenizer and preference
for printable text), with a step of 30 ms or more on one core. So is another one of the size of `random`, whose answers
differ from those of `random`, and one of 0.4 billion parameters (bfloat16), whose weights take long to load.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.client import ServerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RANDOM, SMOLLM2, HEAVY, OTHER, LARGE = "random", "smollm2", "heavy", "other", "large"
MODELS = (RANDOM, HEAVY, SMOLLM2)

_SEED = 7
_SIZES = {
    HEAVY: {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 30,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    OTHER: {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    LARGE: {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
_FORMAT = 1


@functools.cache
def model_folder(name: str) -> Path:
    """Folder of the model, made or fetched at the first call. Raises ServerError if it cannot be had."""
    if name in (RANDOM, SMOLLM2):
        return _named(name)
    ours = model_folder(RANDOM)
    sizes = _SIZES[name]
    recipe = json.dumps([_FORMAT, _SEED, sizes, ours.name])
    folder = ours.parent / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        _make(folder, ours, sizes)
    return folder


def _named(name: str) -> Path:
    """Have `dynamo serve` make or fetch one of its own models, and say where."""
    command = [str(Path(sys.executable).with_name("dynamo")), "serve", name, "--dry-run", "--json"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode != 0:
        raise ServerError(f"there is no model {name}: {told.stderr.strip()}")
    services = json.loads(told.stdout)["graph"]["services"]
    return Path(next(each["config"]["model"] for each in services if "model" in each["config"]))


def _make(folder: Path, ours: Path, sizes: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        draft = Path(scratch, folder.name)
        draft.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(ours / name, draft)
        config = json.loads((ours / "config.json").read_text()) | sizes
        if sizes is _SIZES[LARGE]:
            config |= {"dtype": "bfloat16"}
        (draft / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        _write_weights(draft / "model.safetensors", config)
        draft.rename(folder)


def _write_weights(path: Path, config: dict[str, Any]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.default_rng(_SEED)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def normal(rows: int, columns: int) -> NDArray[np.float32]:
        """Scaled so that what goes in comes out as large."""
        values = draw.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(columns**-0.5)

    ones = np.ones(hidden, dtype=np.float32)
    tensors = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden) * np.float32(hidden**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": normal(config["vocab_size"], hidden) * 8 * _preference(config["vocab_size"]),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": normal(queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": normal(keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": normal(keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": normal(hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": normal(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": normal(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": normal(hidden, inner),
        }
    if config.get("dtype") == "bfloat16":
        _save_halved(tensors, path)
    else:
        save_file(tensors, path, metadata={"format": "pt"})


def _save_halved(tensors: Mapping[str, NDArray[np.float32]], path: Path) -> None:
    """Write them in bfloat16, which numpy does not know."""
    import torch
    from safetensors.torch import save_file

    halved = {name: torch.from_numpy(tensor).to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(halved, path, metadata={"format": "pt"})


def _preference(vocabulary: int) -> NDArray[np.float32]:
    """Return a factor for each token, so that printable ASCII wins over all else, as in the model `random`."""
    import numpy as np

    factors = np.full((vocabulary, 1), 0.3, dtype=np.float32)
    factors[32:127] = 1.0
    return factors
