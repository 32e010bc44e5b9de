"""A live request as its frontend knows it, and the collection of all live requests of a frontend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from components.frontend.answers.kept_log import Recording
from components.frontend.migration.state import MigrationRecord
from components.frontend.request_context import RouteNotes
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import REQUEST, Event, RequestNews
from dynamo_local.core.messages.routing import Assignment
from dynamo_local.core.messages.work import Progress, RequestEpoch
from dynamo_local.core.ports import Request
from dynamo_local.core.request.log import RequestLog, told_id
from dynamo_local.core.request.recovery import Pace, Recovery
from dynamo_local.core.subjects import Subjects

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A prompt in the prefill queue, or at the prefill worker that claimed it. Several requests may wait for one
    job."""

    id: str
    """Of the job in the queue that stands for it now: two prompts that wait may change places."""
    request_id: str
    """The request that the prefill worker is given."""
    deadline: float
    """When the job ends if it is not claimed, and after the claim, if it is not computed (CLOCK_MONOTONIC, s)."""
    granted: RequestEpoch | None = None
    """The epoch under which the last claim was granted."""
    claims: int = 0
    """Number of claims. (NATS counts deliveries, but starts again from one when it is restarted.)"""
    priority: int = 0
    """Priority of the request for which it was published: its place in the queue."""
    tokens: int = 0
    """Length of the prompt."""


@dataclass(frozen=True)
class Held:
    """A finished prefill: the worker that keeps its KV until the epoch is cancelled, and that epoch."""

    worker: str
    request: RequestEpoch


@dataclass
class PrefillRecord:
    """The remote prefill of one request. Written by prefill.py."""

    decode_worker: str | None = None
    """Lease of the worker that the request is charged to, while another worker is to prefill the prompt."""
    job: Job | None = None
    """The job that the request waits for. Requests with the same prompt may wait for one job."""
    jobs: int = 0
    """Number of jobs that the request has waited for."""
    held: Held | None = None
    """A finished prefill of the prompt, to be pulled by the decode worker."""


@dataclass
class LiveRequest:
    """A request that has not ended. Times are CLOCK_MONOTONIC, in seconds.

    The last three attributes are records of one subject each, and each is written in one place: `recovery` by its own
    methods, `prefill` by prefill.py, `migration` by its own methods.
    """

    request: Request
    log: RequestLog
    born_at: float
    pace: Pace = field(default_factory=Pace)
    recovery: Recovery = field(default_factory=Recovery)
    prefill: PrefillRecord = field(default_factory=PrefillRecord)
    migration: MigrationRecord = field(default_factory=MigrationRecord)
    assignment: Assignment | None = None
    """The last answer to the question who is to take the request. Written by placing.py."""
    notes: RouteNotes | None = None
    """Where it goes is noted there. None: nobody asks."""
    recording: Recording | None = None
    """Takes what it outputs. None: its answer is not kept."""
    first_token_at: float | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def progress(self) -> Progress:
        return Progress(self.request_id, self.log.epoch, self.log.position)

    @property
    def tokens(self) -> int:
        """Number of tokens of the context: the prompt, and all accepted tokens."""
        return len(self.request.prompt_token_ids) + self.log.position

    @property
    def at_prefill_worker(self) -> bool:
        """Whether a prefill worker has the request now, under the current epoch."""
        job = self.prefill.job
        return job is not None and job.granted == self.log.current and self.log.worker is not None

    def is_with(self, worker: str) -> bool:
        """Whether the worker's engine computes anything for the request: as its owner, or as the destination of its
        migration."""
        current = self.migration.current
        return self.log.worker == worker or (current is not None and current.destination == worker)

    def loses(self, gone: Presence) -> bool:
        """Note that a worker has left the fleet. Return whether the request is to be placed elsewhere for that."""
        if gone.state == "failed" and self.is_with(gone.lease):
            self.recovery.engine_died()
        return self.log.worker == gone.lease or (self.recovery.standing.suspect and self.is_with(gone.lease))

    def accepted(self, now: float) -> None:
        """Note that tokens of the request were accepted."""
        self.pace.note(now)
        if self.first_token_at is None:
            self.first_token_at = now
        self.recovery.accept(self.log.position)
        self.migration.accept(now)


class LiveRequests(dict[str, LiveRequest]):
    """All live requests of a frontend, by id."""

    def __init__(self) -> None:
        super().__init__()
        self._added = asyncio.Event()

    def __setitem__(self, request_id: str, live: LiveRequest) -> None:
        super().__setitem__(request_id, live)
        self._added.set()

    def is_live(self, live: LiveRequest) -> bool:
        """Return whether this very request has not ended. Another request may have come under its id since."""
        return self.get(live.request_id) is live

    async def pause(self, seconds: float) -> None:
        """Wait for so long, and then until there is a request. For loops that look after requests."""
        await asyncio.sleep(seconds)
        await self.some()

    async def some(self) -> None:
        """Wait until there is a request."""
        while not self:
            self._added.clear()
            await self._added.wait()


# Tells the server what happens to requests, for those who follow its events: which worker has a request, its first
# token, its end.
#
# Requests are looked at in intervals, and all that has changed is one message. Of too many new requests some are left
# out, from their beginning to their end.

LOOK_EVERY_S = 0.5
MOST_NEW = 25
"""New requests that are told of at each look."""


@dataclass
class _Told:
    """What was told of a request. `worker`: the watcher that has it."""

    worker: str = ""
    has_tokens: bool = False


class RequestEvents:
    """The events of the requests of one model. `watcher_of`: the watcher of a worker's lease."""

    def __init__(
        self,
        requests: LiveRequests,
        watcher_of: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._watcher_of = watcher_of
        self._clock = clock
        self._told: dict[str, _Told | None] = {}
        """By request; None for those that are left out."""
        self._events: list[Event] = []
        self._new = 0
        self._left_out = 0

    def end(self, live: LiveRequest, failed: bool) -> None:
        """Note that a request has ended."""
        self._note(live)
        if self._told.pop(live.request_id) is not None:
            what = "failed" if failed else "ended"
            self._events.append(self._event(live, what, self._clock(), live.log.position))

    def look(self) -> RequestNews | None:
        """Return what has happened since the last look; None if nothing has."""
        for live in self._requests.values():
            self._note(live)
        events, left_out = tuple(self._events), self._left_out
        self._events, self._new, self._left_out = [], 0, 0
        return RequestNews(events, left_out) if events or left_out else None

    async def run(self, bus: Bus, subjects: Subjects) -> None:
        """Send what happens, until cancelled. A failure is logged: no work depends on it."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if (news := self.look()) is not None:
                try:
                    await bus.send(subjects.request_news, news)
                except BusError as error:
                    _log.info("what happened to %d requests is not told: %s", len(news.events), error)
            elif not self._requests:
                await self._requests.some()

    def _note(self, live: LiveRequest) -> None:
        if live.request_id not in self._told:
            self._told[live.request_id] = _Told() if self._new < MOST_NEW else None
            self._new += 1
            self._left_out += self._told[live.request_id] is None
        told = self._told[live.request_id]
        if told is not None:
            self._events += self._changes(live, told)

    def _changes(self, live: LiveRequest, told: _Told) -> Iterator[Event]:
        worker = self._worker(live)
        if worker and worker != told.worker:
            what = "its prompt is computed" if live.at_prefill_worker else "is with a worker"
            told.worker = worker
            yield self._event(live, what, self._clock(), live.log.position)
        if live.first_token_at is not None and not told.has_tokens:
            told.has_tokens = True
            yield self._event(live, "first token", live.first_token_at, 1)

    def _worker(self, live: LiveRequest) -> str:
        """The watcher of the worker that has the request; empty if none has, or it is not known any more."""
        return "" if live.log.worker is None else self._watcher_of(live.log.worker)

    def _event(self, live: LiveRequest, what: str, at: float, tokens: int) -> Event:
        request, took_s = told_id(live.request_id), round(at - live.born_at, 4)
        return Event(REQUEST, what, watcher=self._worker(live), request=request, took_s=took_s, tokens=tokens)
