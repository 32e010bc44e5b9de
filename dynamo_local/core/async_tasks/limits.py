"""Settings of asynchronous tasks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TaskLimits:
    """Bounds on asynchronous tasks, and on how long their results are kept."""

    task_retention_s: float = field(
        default=86400.0, metadata={"help": "How long the result of an asynchronous task is kept, in s."}
    )
    task_patience_s: float = field(
        default=86400.0,
        metadata={
            "help": "How long an asynchronous task is tried again while its model has no room or no worker, in s. "
            "After that it fails."
        },
    )
    max_tasks: int = field(
        default=10_000,
        metadata={
            "help": "Maximum number of asynchronous tasks of each key, those with a result included. More get status "
            "507."
        },
    )
    max_task_bytes: int = field(
        default=1024 * 1024 * 1024,
        metadata={
            "help": "Size of the tasks kept for a key, with their results, in bytes. Beyond it no more are taken, and "
            "results fail."
        },
    )
    max_task_requests: int = field(
        default=256,
        metadata={
            "help": "Maximum number of asynchronous tasks in flight for each model in a frontend, if the model's ready "
            "workers run so many at once."
        },
    )
