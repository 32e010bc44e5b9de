"""Workers: processes that hold an engine and put requests to it."""

from components.workers.worker import VllmWorker

__all__ = ["VllmWorker"]
