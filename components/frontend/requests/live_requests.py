"""A live request as its frontend knows it, and the collection of all live requests of a frontend."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from components.frontend.answers.kept_log import Recording
from components.frontend.explaining import RouteNotes
from components.frontend.migration.state import MigrationRecord
from components.frontend.prefill.prefill_jobs import PrefillRecord
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routing import Assignment
from dynamo_local.core.messages.work import Progress
from dynamo_local.core.ports import Request
from dynamo_local.core.request.log import RequestLog
from dynamo_local.core.request.recovery import Pace, Recovery


@dataclass
class LiveRequest:
    """A request that has not ended. Times are CLOCK_MONOTONIC, in seconds.

    The last three attributes are records of one subject each, and each is written in one place: `recovery` by its own
    methods, `prefill` by remote_prefill.py, `migration` by its own methods.
    """

    request: Request
    log: RequestLog
    born_at: float
    pace: Pace = field(default_factory=Pace)
    recovery: Recovery = field(default_factory=Recovery)
    prefill: PrefillRecord = field(default_factory=PrefillRecord)
    migration: MigrationRecord = field(default_factory=MigrationRecord)
    assignment: Assignment | None = None
    """The last answer to the question who is to take the request. Written by placer.py."""
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
