"""Settings of the frontend, and the keys that it reads from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynamo_local.core.async_tasks.callbacks import CallbackLimits
from dynamo_local.core.async_tasks.records import TaskLimits
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.stored.batches import BatchLimits
from dynamo_local.core.stored.files import FileLimits


@dataclass(frozen=True)
class AnswerLimits:
    """Bounds on answers that are kept, and on how long that is."""

    answer_retention_s: float = field(
        default=86400.0, metadata={"help": "How long an answer is kept after it has ended, in s."}
    )
    answer_patience_s: float = field(
        default=3600.0,
        metadata={
            "help": "How long an answer in the background waits for its next token, through restarts and while its "
            "model has no room or no worker, in s. After that it fails."
        },
    )
    max_answers: int = field(
        default=1000, metadata={"help": "Maximum number of answers that are kept for each key. More get status 507."}
    )
    max_answer_bytes: int = field(
        default=256 * 1024 * 1024,
        metadata={"help": "Size of the answers kept for a key beyond which no more are begun, in bytes."},
    )


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
