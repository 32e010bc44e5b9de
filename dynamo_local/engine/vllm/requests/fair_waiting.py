"""The queue of vLLM's scheduler, by which classes of priority and keys take turns (core/priority/fair_queue.py).

vLLM's own queue knows priorities alone: a class that waits gets nothing as long as higher ones come, and of one class
the first that came goes first, whoever has sent how many. Whom vLLM preempts for KV blocks stays its own decision: the
request with the highest priority number, of those the latest. Who gives way for a slot: patches/requests/make_room.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from dynamo_local.core.priority.classes import PriorityClass
from dynamo_local.core.priority.fair_queue import Claim, FairQueue
from dynamo_local.engine.vllm.requests.wire import KEY


class FairRequestQueue(RequestQueue):
    """Requests that have no KV blocks, and wait for a place."""

    def __init__(self) -> None:
        self._queue = FairQueue[Request](lambda request: request.num_tokens, Request.is_finished)

    def add_request(self, request: Request) -> None:
        self._queue.add(request, _claim(request))

    def peek_request(self) -> Request:
        return self._queue.peek()

    def pop_request(self) -> Request:
        return self._queue.pop()

    def make_room(
        self, running: Iterable[Request], ready: Callable[[Request], bool], above: PriorityClass | None
    ) -> Request | None:
        """Return the running request that is to give way to one that waits and is ready, and offer that one next.
        `above`: only if it is of a higher class than this one."""
        return self._queue.make_room(running, ready, above)

    def gives_way(self, running: Iterable[Request], to: PriorityClass) -> Request | None:
        """Return the running request that gives way to one of this class, or None."""
        return self._queue.gives_way(running, to)

    def prepend_request(self, request: Request) -> None:
        """Queue a request again that was preempted: before those of its class and key that came later."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Queue requests again that were popped in this step and could not begin, the last one first."""
        for request in requests:
            self._queue.put_back(request, _claim(request))

    def remove_request(self, request: Request) -> None:
        self._queue.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self._queue:
                self._queue.remove(request)

    def __bool__(self) -> bool:
        return len(self._queue) > 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


def _claim(request: Request) -> Claim:
    return Claim(request.priority, request.arrival_time, request.request_id, _key_of(request.sampling_params))


def _key_of(params: SamplingParams | None) -> str:
    """The API key that a request came with. Requests for pooled outputs, of one step each, are one key."""
    extra = None if params is None else params.extra_args
    key: str = extra.get(KEY, "") if extra else ""
    return key
