"""Placing a request: have a worker assigned, waiting for one if need be, and hand it the request under a new epoch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from components.frontend.assigner import Assigner
from components.frontend.migration.state import MigrationState
from components.frontend.prefill_jobs import Held, Job
from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.fleet.breaker import Breakers
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routing import AssignRequest
from dynamo_local.core.messages.work import Progress, RequestEpoch, Submit
from dynamo_local.core.names import Subjects
from dynamo_local.core.ports import Request
from dynamo_local.core.request.log import RequestLog
from dynamo_local.core.request.pace import Pace
from dynamo_local.core.request.recovery import RecoveryDeadlines, backoff_s
from dynamo_local.core.request.suspicion import Standing

_AVOIDED = 3
"""How many of the workers that failed a request are remembered for it."""


@dataclass
class LiveRequest:
    """A request under way, and what its frontend remembers of it. Times are CLOCK_MONOTONIC."""

    request: Request
    log: RequestLog
    born_at: float
    heard_at: float = 0.0
    """When its worker last gave news of it, or was last asked for some."""
    asked_at: float = 0.0
    """When missing tokens were last asked for."""
    avoid: list[str] = field(default_factory=list)
    fruitless: int = 0
    """Epochs in a row that brought no token."""
    epoch_start: int = 0
    """Position at which the current epoch began."""
    acked: int = 0
    decode: str | None = None
    """The worker that it is assigned to, while another one is to prefill its prompt."""
    job: Job | None = None
    """While its prompt is to be prefilled there. Requests with the same prompt may share one."""
    jobs: int = 0
    """Prefill jobs that it has had a share in."""
    held: Held | None = None
    """A prefill of its prompt that is ready to be pulled."""
    moving: MigrationState | None = None
    """While it is on its way to another worker."""
    stayed: int = 0
    """Moves in a row that did not come about."""
    not_before: float = 0.0
    """When it may be moved again without being asked to, after such a move."""
    moved_at: float | None = None
    """When it last left a worker for another one."""
    turned_down: str | None = None
    """The worker that it was to move to last, if it stayed."""
    pace: Pace = field(default_factory=Pace)
    standing: Standing = field(default_factory=Standing)
    """What engines that died under it make of it."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def progress(self) -> Progress:
        return Progress(self.request_id, self.log.epoch, self.log.position)

    @property
    def at_prefill_worker(self) -> bool:
        """Whether a prefill worker is at it now, under the current epoch."""
        return self.job is not None and self.job.granted == self.log.current and self.log.worker is not None

    def is_with(self, worker: str) -> bool:
        """Whether that worker's engine has anything of it to compute."""
        return self.log.worker == worker or (self.moving is not None and self.moving.destination == worker)

    def loses(self, gone: Presence) -> bool:
        """Note that a worker is gone. Returns whether the request is to be taken up elsewhere for that."""
        if gone.state == "failed" and self.is_with(gone.lease):
            self.standing = self.standing.after_death()
        return self.log.worker == gone.lease or (self.standing.suspect and self.is_with(gone.lease))

    @property
    def tokens(self) -> int:
        """Of its context: the prompt, and what was accepted."""
        return len(self.request.prompt_token_ids) + self.log.position

    def accepted(self, now: float) -> None:
        """Note that tokens of it were accepted."""
        self.pace.note(now)
        self.standing = self.standing.after_tokens(self.log.position - self.epoch_start)
        if self.moving is not None:
            self.moving.note_token(now)

    def stir(self) -> None:
        """Have its move look at it: it is over, or has lost its worker."""
        if self.moving is not None:
            self.moving.changed.set()

    def lost(self, worker: str) -> None:
        """Note that `worker` lost the request or failed it."""
        self.fruitless = 0 if self.log.position > self.epoch_start else self.fruitless + 1
        self.avoid = [*self.avoid, worker][-_AVOIDED:]


class LiveRequests(dict[str, LiveRequest]):
    """All requests of a frontend, by id."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = asyncio.Event()

    def __setitem__(self, request_id: str, live: LiveRequest) -> None:
        super().__setitem__(request_id, live)
        self._begun.set()

    async def pause(self, seconds: float) -> None:
        """Wait for so long, and then until there is a request: for those who look after them."""
        await asyncio.sleep(seconds)
        await self.some()

    async def some(self) -> None:
        """Wait until there is a request."""
        while not self:
            self._begun.clear()
            await self._begun.wait()


class Placer:
    """Places the requests of one frontend. `is_held_up`: whether a worker is there that takes requests again soon."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        lease: str,
        assigner: Assigner,
        breakers: Breakers,
        patience: RecoveryDeadlines,
        is_held_up: Callable[[], bool],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._lease = lease
        self._assigner = assigner
        self._breakers = breakers
        self._patience = patience
        self._is_held_up = is_held_up
        self._fleet_changed = asyncio.Event()
        """Set at the next change of the fleet, and then replaced."""

    def fleet_changed(self) -> None:
        """Have requests that wait for a worker ask again."""
        changed, self._fleet_changed = self._fleet_changed, asyncio.Event()
        changed.set()

    async def assign(self, live: LiveRequest, is_wanted: Callable[[], bool]) -> str | None:
        """The worker to take the request; None if none became routable in time, or nobody wants it any more."""
        await asyncio.sleep(backoff_s(live.fruitless))
        begin = time.monotonic()
        while True:
            # Taken before asking, so that no change between the answer and the wait is missed.
            changed = self._fleet_changed
            worker = await self._assigner.assign(self._question(live))
            first = live.log.epoch == 0 and not self._is_held_up()
            patience_s = self._patience.placement_s if first else self._patience.recovery_s
            remaining = begin + patience_s - time.monotonic()
            if worker is not None or remaining <= 0 or not is_wanted():
                return worker
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(remaining, self._patience.ask_again_s))

    async def send(self, live: LiveRequest, current: RequestEpoch, worker: str) -> None:
        """Hand the request over, from the end of its log on. Raises BusError."""
        work = self.submission(live, current)
        if live.held is not None and live.held.worker != worker:
            work = msgspec.structs.replace(work, source=live.held.worker)
        await self._bus.publish(self._subjects.work(worker), codec.encode(work))

    def submission(self, live: LiveRequest, current: RequestEpoch, at_most: int | None = None) -> Submit:
        """The request as a worker is given it, to generate `at_most` further tokens."""
        request, log = live.request, live.log
        live.epoch_start = log.position
        live.heard_at = time.monotonic()
        return Submit(
            request_id=current.request_id,
            epoch=current.epoch,
            frontend=self._lease,
            token_ids=[*request.prompt_token_ids, *log.tokens],
            sampling=msgspec.Raw(request.sampling(log.position, at_most)),
            position=log.position,
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            session_id=request.session_id,
            trace_headers=None if request.trace_headers is None else dict(request.trace_headers),
            exclusive=live.standing.suspect,
        )

    def _question(self, live: LiveRequest) -> AssignRequest:
        return AssignRequest(
            request_id=live.request_id,
            frontend=self._lease,
            tokens=live.tokens,
            avoid=(*live.avoid, *self._breakers.open(time.monotonic())),
        )
