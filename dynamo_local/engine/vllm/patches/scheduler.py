"""vLLM's scheduler lets classes of priority and keys take turns, and has room for urgent requests.

Imports vLLM. Who goes first and who gives way is decided in core/priority/fair_queue.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import PriorityRequestQueue, RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from dynamo_local.core.priority.classes import class_of
from dynamo_local.core.priority.fair_queue import Claim, FairQueue
from dynamo_local.engine.vllm.patches.table import applies
from dynamo_local.engine.vllm.requests.wire import KEY

# The queue of vLLM's scheduler.
#
# vLLM's own queue knows priorities alone: a class that waits gets nothing as long as higher ones come, and of one class
# the first that came goes first, whoever has sent how many. Whom vLLM preempts for KV blocks stays its own decision:
# the request with the highest priority number, of those the latest. Who gives way for a slot is said below.


class FairRequestQueue(FairQueue[Request], RequestQueue):
    """Requests that have no KV blocks, and wait for a place."""

    def __init__(self) -> None:
        super().__init__(lambda request: request.num_tokens, Request.is_finished)

    def add_request(self, request: Request) -> None:
        self.add(request, _claim(request))

    def peek_request(self) -> Request:
        return self.peek()

    def pop_request(self) -> Request:
        return self.pop()

    def prepend_request(self, request: Request) -> None:
        """Queue a request again that was preempted: before those of its class and key that came later."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Queue requests again that were popped in this step and could not begin, the last one first."""
        for request in requests:
            self.put_back(request, _claim(request))

    def remove_request(self, request: Request) -> None:
        self.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self:
                self.remove(request)

    def __bool__(self) -> bool:
        return len(self) > 0


def _claim(request: Request) -> Claim:
    return Claim(request.priority, request.arrival_time, request.request_id, _key_of(request.sampling_params))


def _key_of(params: SamplingParams | None) -> str:
    """The API key that a request came with. Requests for pooled outputs, of one step each, are one key."""
    extra = None if params is None else params.extra_args
    key: str = extra.get(KEY, "") if extra else ""
    return key


# The scheduler uses this queue where it schedules by priority.


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


# Has a running request give way to one of a higher class that waits while vLLM's scheduler has no slot left.
#
# vLLM itself preempts where KV blocks are wanting, and never for a slot: an urgent request waits until another one
# ends. Who gives way: core/priority/fair_queue.py. It does so before a step is planned, by vLLM's own
# `_preempt_request`, as all do in `reset_prefix_cache`. So what a step in flight still computes for it is delivered, or
# dropped, and its blocks are freed, as vLLM does that. It enters the queue when the step has been planned, because vLLM
# lets none in that was preempted in the same step.
#
# vLLM lets those in first whose KV has been loaded, whatever their class. They are kept out of a step in which one
# gives way to a request of a higher class than theirs.

_CAN_BEGIN = RequestStatus.WAITING, RequestStatus.PREEMPTED


@cache
def have_urgent_requests_find_room() -> None:
    """Patch the scheduler in this process, and so in those forked from it. A second call changes nothing."""
    if not applies("room for urgent requests"):
        return
    # Through a name of no type: mypy sees no more than that a method is assigned.
    scheduler: Any = Scheduler
    scheduler.schedule = _making_room(scheduler.schedule)


def _making_room(schedule: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
    @wraps(schedule)
    def making_room(scheduler: Any, throttle_prefills: bool = False) -> SchedulerOutput:
        # A step that puts off prompts lets nobody in.
        victim, later = (None, ()) if throttle_prefills else _gives_way(scheduler)
        if victim is None:
            return schedule(scheduler, throttle_prefills)
        scheduler.running.remove(victim)
        scheduler._preempt_request(victim, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery)
        scheduler.waiting.remove_request(victim)
        scheduler.kv_holding_waiting.remove_requests(later)
        try:
            return schedule(scheduler, throttle_prefills)
        finally:
            scheduler.waiting.prepend_request(victim)
            for request in later:
                scheduler.kv_holding_waiting.add_request(request)

    return making_room


def _gives_way(scheduler: Any) -> tuple[Request | None, Sequence[Request]]:
    """The running request that is to give way, or None, and those that are loaded and to be let in later."""
    waiting = scheduler.waiting
    if not isinstance(waiting, FairRequestQueue) or scheduler.pause_state != PauseState.UNPAUSED:
        return None, ()
    if len(scheduler.running) + scheduler.num_waiting_for_streaming_input < scheduler.max_num_active_reqs:
        return None, ()
    loaded = [request for request in scheduler.kv_holding_waiting if _can_begin(scheduler, request)]
    highest = class_of(loaded[0].priority) if loaded else None
    victim = waiting.make_room(scheduler.running, lambda request: _can_begin(scheduler, request), highest)
    if victim is not None or highest is None:
        return victim, loaded
    return waiting.gives_way(scheduler.running, highest), ()


def _can_begin(scheduler: Any, request: Request) -> bool:
    """Whether vLLM would let it in now, if it found slot and blocks."""
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        grammar = request.structured_output_request and request.structured_output_request.grammar
        return grammar is not None and not isinstance(grammar, Exception)
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    return request.status in _CAN_BEGIN and _adapter_has_room(scheduler, request)


def _adapter_has_room(scheduler: Any, request: Request) -> bool:
    """Whether vLLM would not pass it over because the running ones have all adapters that may be used at a time."""
    if not scheduler.lora_config or request.lora_request is None:
        return True
    used = {one.lora_request.lora_int_id for one in scheduler.running if one.lora_request is not None}
    return request.lora_request.lora_int_id in used or len(used) < scheduler.lora_config.max_loras
