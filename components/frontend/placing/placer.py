"""Gives requests to workers: asks which worker is to take a request, waits for one if need be, and submits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from components.frontend.placing.assigner import Assigner
from components.frontend.placing.blocks import NO_BLOCKS, blocks_of
from components.frontend.placing.waiting_line import WaitingLine
from components.frontend.requests.live_requests import LiveRequest, LiveRequests
from components.frontend.worker_link import WorkerLink
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.breaker import Breakers
from dynamo_local.core.messages.routing import Assignment, AssignRequest
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.request.recovery import RecoveryDeadlines, backoff_s


class Placer:
    """Places the requests of one frontend. Keeps the assigner's account of which worker has which request."""

    def __init__(
        self,
        requests: LiveRequests,
        link: WorkerLink,
        fleet: FleetWatch,
        assigner: Assigner,
        deadlines: RecoveryDeadlines,
    ) -> None:
        self._requests = requests
        self._link = link
        self._fleet = fleet
        self._assigner = assigner
        self.deadlines = deadlines
        self.breakers = Breakers()
        """The workers that are avoided because they failed requests lately."""
        self._line = WaitingLine()
        """Requests that wait for a change of the fleet."""
        self.waiting = 0
        """Number of requests that wait for a worker."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when a request begins to wait."""

    def fleet_changed(self) -> None:
        """Have requests that wait for a worker ask again, the most urgent first."""
        self._line.wake()

    def is_routable(self, worker: str | None) -> bool:
        """Return whether the worker takes requests."""
        return any(presence.lease == worker for presence in self._fleet.view.routable())

    async def assign(self, live: LiveRequest) -> str | None:
        """Return the worker to take the request; None if none became routable in time, or the request has ended."""
        await asyncio.sleep(backoff_s(live.recovery.fruitless))
        begin = time.monotonic()
        while True:
            # Joined before asking, so that no change between the answer and the wait is missed.
            with self._line.joined(live.request) as changed:
                live.assignment = await self._assigner.assign(await self._question(live))
                self._explain(live, live.assignment)
                worker = live.assignment.worker
                # A worker that is set apart takes requests again soon.
                first = live.log.epoch == 0 and not self._fleet.view.exclusive()
                deadline_s = self.deadlines.placement_s if first else self.deadlines.recovery_s
                remaining = begin + deadline_s - time.monotonic()
                if worker is not None or remaining <= 0 or not self._requests.is_live(live):
                    return worker
                self.waiting += 1
                try:
                    self.on_wait()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(remaining, self.deadlines.ask_again_s)):
                            await changed
                finally:
                    self.waiting -= 1

    async def reassign(self, live: LiveRequest, worker: str) -> None:
        """Have the request charged to this worker, which was chosen without asking."""
        await self._assigner.reassign(live.request_id, worker, live.tokens)

    async def release(self, live: LiveRequest) -> None:
        """Have the request charged to no worker."""
        await self._assigner.release(live.request_id)

    async def send(self, live: LiveRequest, current: RequestEpoch, worker: str) -> None:
        """Submit the request to the worker, from the end of its log on. Raises BusError."""
        work = self.submission(live, current)
        source = self._source(live, worker)
        if source is not None:
            work = msgspec.structs.replace(work, source=source)
        await self._link.submit(worker, work)

    async def prefilled(self, live: LiveRequest) -> None:
        """Note that the request's worker has sent the first token of its epoch."""
        await self._assigner.prefilled(live.request_id)

    def submission(self, live: LiveRequest, current: RequestEpoch, at_most: int | None = None) -> Submit:
        """Return the request as a worker is given it, to generate `at_most` further tokens. Begins the epoch."""
        request, log = live.request, live.log
        live.recovery.begin_epoch(log.position, time.monotonic())
        return Submit(
            request_id=current.request_id,
            epoch=current.epoch,
            frontend=self._link.frontend,
            token_ids=[*request.prompt_token_ids, *log.tokens],
            sampling=msgspec.Raw(request.sampling(log.position, at_most)),
            position=log.position,
            arrival_time=request.arrival_time,
            priority=request.priority,
            key=request.key,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            session_id=request.session_id,
            trace_headers=None if request.trace_headers is None else dict(request.trace_headers),
            exclusive=live.recovery.standing.suspect,
            pools=request.pools,
        )

    def _source(self, live: LiveRequest, worker: str) -> str | None:
        """The worker from which the KV of the request's context is to be pulled."""
        held, assignment = live.prefill.held, live.assignment
        if held is not None:
            return held.worker if held.worker != worker else None
        return assignment.pull_from if assignment is not None and assignment.worker == worker else None

    async def _question(self, live: LiveRequest) -> AssignRequest:
        blocks, block_tokens = NO_BLOCKS
        if self._assigner.needs_blocks:
            context = [*live.request.prompt_token_ids, *live.log.tokens]
            blocks, block_tokens = await blocks_of(live.request, context, self._fleet)
        return AssignRequest(
            request_id=live.request_id,
            frontend=self._link.frontend,
            tokens=live.tokens,
            avoid=(*live.recovery.avoid, *self.breakers.open(time.monotonic())),
            blocks=blocks,
            block_tokens=block_tokens,
            explain=live.notes is not None,
        )

    def _explain(self, live: LiveRequest, assignment: Assignment) -> None:
        if live.notes is not None and assignment.route is not None and assignment.worker is not None:
            live.notes.note(assignment.route, self._name)

    def _name(self, lease: str) -> str:
        presence = self._fleet.view.get(lease)
        return lease if presence is None else presence.watcher
