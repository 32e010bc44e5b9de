"""Settings of the frontend, and the keys that it reads from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from components.frontend.answers.limits import AnswerLimits
from dynamo_local.core.async_tasks.callbacks import CallbackLimits
from dynamo_local.core.async_tasks.limits import TaskLimits
from dynamo_local.core.errors import ConfigError
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.stored.batches import BatchLimits
from dynamo_local.core.stored.files import FileLimits

_LARGEST_KEY_FILE = 1024 * 1024
"""In bytes."""


@dataclass(frozen=True)
class FrontendSettings(AnswerLimits, AdmissionLimits, FileLimits, BatchLimits, TaskLimits, CallbackLimits):
    """The frontend's own settings, beside those of vLLM's server and engine."""

    api_key_file: Path | None = field(
        default=None,
        metadata={
            "help": "File with API keys, one per line; changes take effect within a second. Without it, no key is "
            "required."
        },
    )
    admin_key_file: Path | None = field(
        default=None,
        metadata={
            "help": "File with keys of administrators, one per line, who may change endpoints under /v1/endpoints; "
            "changes take effect within a second. Without it, these paths are closed."
        },
    )
    request_timeout_s: float = field(
        default=600.0, metadata={"help": "Maximum time from the arrival of a request to its last token, in s."}
    )
    recovery_timeout_s: float = field(
        default=120.0, metadata={"help": "How long a request that lost its worker waits for another worker, in s."}
    )
    drain_timeout_s: float = field(
        default=15.0, metadata={"help": "How long requests in flight may take to finish when the server stops, in s."}
    )


def limits_of(settings: FrontendSettings, config: Mapping[str, Any]) -> FrontendSettings:
    """Return the limits of a model. vLLM's max-logprobs also sets max-candidates, if that is not set itself."""
    if "max-candidates" in config or config.get("max-logprobs") is None:
        return settings
    return replace(settings, max_candidates=config["max-logprobs"])


def read_keys(path: Path | None, setting: str) -> tuple[str, ...]:
    """Read the keys of a file; none without one. Raises ConfigError, also for a file without keys."""
    return () if path is None else keys_in(path.expanduser(), setting)


def keys_in(path: Path, setting: str) -> tuple[str, ...]:
    """Read the keys of a file. Raises ConfigError, also for a file without keys."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_KEY_FILE + 1)
        keys = tuple(line.strip() for line in data.decode().splitlines() if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}") from error
    except UnicodeError as error:
        raise ConfigError(f"{path} holds no keys, which are text", "write one key per line") from error
    if len(data) > _LARGEST_KEY_FILE:
        raise ConfigError(f"{path} is larger than {_LARGEST_KEY_FILE} bytes", "write one key per line")
    if not keys:
        # An empty file must not open the server to everybody.
        raise ConfigError(f"{path} holds no key", f"write one key per line, or leave {setting} out")
    return keys
