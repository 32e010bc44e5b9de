"""Settings of answers that are kept."""

from __future__ import annotations

from dataclasses import dataclass, field


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
