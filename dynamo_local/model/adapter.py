"""What is wrong with a LoRA adapter, found from its files: nothing heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path

from dynamo_local.core.errors import UsageError

CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Files of which vLLM reads one (`vllm/lora/lora_model.py`)."""


def read_rank(name: str, folder: Path) -> int:
    """The rank of the adapter in a folder; 0 if its configuration does not say.

    Raises UsageError if there is no adapter. What else is wrong with it is left to vLLM.
    """
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
    return rank if isinstance(rank, int) else 0


def _refused(name: str, folder: Path, why: str) -> UsageError:
    return UsageError(f"adapter {name}: {folder} {why}", "name a folder with a LoRA adapter, as peft writes them")
