"""Workers: processes that hold an engine and put requests to it."""

from components.workers.worker import PrefillWorker, VllmWorker

__all__ = ["PrefillWorker", "VllmWorker"]
