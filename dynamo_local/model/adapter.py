"""What is wrong with a LoRA adapter, found from its files: nothing heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path

from dynamo_local.core.errors import UsageError

CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Files of which vLLM reads one (`vllm/lora/lora_model.py`)."""


def check_adapter(name: str, folder: Path, most_rank: int) -> None:
    """Raise UsageError unless the folder has an adapter of at most this rank. What else is wrong is left to vLLM."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        weights = any((folder / weights).is_file() for weights in _WEIGHTS)
    except FileNotFoundError as error:
        raise _refused(name, folder, f"has no {CONFIG}" if folder.is_dir() else "does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(name, folder, f"has no {CONFIG} that can be read") from error
    if not weights:
        raise _refused(name, folder, f"has none of {', '.join(_WEIGHTS)}")
    rank = config.get("r") if isinstance(config, dict) else None
    if isinstance(rank, int) and rank > most_rank:
        raise UsageError(
            f"adapter {name} has rank {rank}, and its base takes {most_rank} at most", "raise max-lora-rank of the base"
        )


def _refused(name: str, folder: Path, why: str) -> UsageError:
    return UsageError(f"adapter {name}: {folder} {why}", "name a folder with a LoRA adapter, as peft writes them")
