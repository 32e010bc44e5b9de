"""Has vLLM's scheduler use the queue of requests/fair_waiting.py where it schedules by priority."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler

from dynamo_local.engine.vllm.patches.check import applies
from dynamo_local.engine.vllm.requests.fair_waiting import FairRequestQueue


@cache
def have_requests_take_turns() -> None:
    """Patch the scheduler in this process, and so in those forked from it. A second call changes nothing."""
    if not applies("turns of waiting requests"):
        return
    # Through a name of no type: mypy sees no more than that a method is assigned.
    scheduler: Any = Scheduler
    scheduler.__init__ = _taking_turns(scheduler.__init__)


def _taking_turns(initialise: Callable[..., None]) -> Callable[..., None]:
    @wraps(initialise)
    def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        initialise(scheduler, *args, **kwargs)
        # Those of the other queue have KV blocks already, and go first in any case.
        if isinstance(scheduler.waiting, PriorityRequestQueue):
            scheduler.waiting = FairRequestQueue()

    return init
