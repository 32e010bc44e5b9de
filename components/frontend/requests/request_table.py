"""Follows a frontend's requests: each is added, placed, placed again when its worker is lost, and ended.

What goes wrong with a request comes to one of two things. It continues elsewhere from its log, under a new epoch, if
its sampling survives that (core/request/recovery.py); otherwise it fails, which is an answer to this one request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from components.frontend.answers.kept_log import Recording
from components.frontend.placing import Assigner, Placer
from components.frontend.prefill import PrefillJobs, RemotePrefill
from components.frontend.request_context import RouteNotes
from components.frontend.requests.live_requests import LiveRequest, LiveRequests
from components.frontend.worker_link import WorkerLink
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import Change
from dynamo_local.core.messages.work import Fault, RequestEpoch, TokenDelta
from dynamo_local.core.ports import Outputs, Request
from dynamo_local.core.request.log import RequestLog, failure
from dynamo_local.core.request.recovery import Ask, Begin, RecoveryDeadlines, next_step, verdict_after_loss
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


class RequestTable:
    """All live requests of one frontend, and what becomes of them.

    `outputs` is what the OpenAI server is to get. The parts that place requests are built here, too: `placer`,
    `trials` of suspect requests, and `remote_prefill`. `on_end` is called with each request that ends, and whether it
    has failed.
    """

    def __init__(
        self,
        link: WorkerLink,
        fleet: FleetWatch,
        assigner: Assigner,
        tasks: TaskGuard,
        deadlines: RecoveryDeadlines,
        jobs: PrefillJobs | None,
    ) -> None:
        """`jobs`: None if the graph has no prefill workers."""
        self._link = link
        self._fleet = fleet
        self._tasks = tasks
        self._deadlines = deadlines
        self.requests = LiveRequests()
        self.outputs: asyncio.Queue[Outputs] = asyncio.Queue()
        self.placer = Placer(self.requests, link, fleet, assigner, deadlines)
        self.trials = Trials(self.requests, link, fleet, tasks, deadlines)
        self.remote_prefill = RemotePrefill(self.requests, self.placer, self.place, link, tasks, jobs)
        self.on_end: Callable[[LiveRequest, bool], None] = lambda live, failed: None

    def add(self, request: Request, notes: RouteNotes | None = None, recording: Recording | None = None) -> None:
        """Begin the request's log, and place it. `notes`: where it goes is noted there. `recording`: has what it has
        output before, and takes what it will."""
        before = () if recording is None else recording.before
        log = RequestLog(
            request.request_id, request.prompt_token_ids, [one for each in before for one in each.token_ids]
        )
        for delta in before:
            # vLLM appends to the lists of tokens that it gets.
            again = msgspec.structs.replace(delta, request_id=request.request_id, token_ids=[*delta.token_ids])
            self.outputs.put_nowait(Outputs(time.monotonic(), (again,)))
        if before and before[-1].finish is not None:
            return
        live = LiveRequest(request, log, born_at=time.monotonic(), notes=notes, recording=recording)
        self.requests[request.request_id] = live
        self._tasks.spawn(f"place {request.request_id}", self.place(live))

    def record(self, delta: TokenDelta) -> None:
        """Have tokens that were accepted recorded, if the answer to their request is kept."""
        live = self.requests.get(delta.request_id)
        if live is not None and live.recording is not None:
            live.recording.take(delta)

    def refuse(self, request: Request, why: str) -> None:
        """Answer a request that is not even begun with an error that is its client's."""
        log = RequestLog(request.request_id, request.prompt_token_ids)
        self.outputs.put_nowait(Outputs(time.monotonic(), (failure(log, why, "request"),)))

    async def remove(self, request_ids: Iterable[str]) -> None:
        """End requests without an answer: they have been answered in full, or nobody wants the answer."""
        # All are taken out before the first is seen to: what becomes of it may depend on which others are wanted.
        for live in [live for request_id in request_ids if (live := self.requests.pop(request_id, None)) is not None]:
            self.on_end(live, False)
            await self._leave_worker(live)

    async def fail(self, live: LiveRequest, why: str, fault: Fault | None = None) -> None:
        """End the request with an error as its answer. Does nothing if it has ended already."""
        if not self.requests.is_live(live):
            return
        del self.requests[live.request_id]
        _log.warning("request %s failed: %s", live.request_id, why)
        failed = failure(live.log, why, fault)
        if live.recording is not None:
            live.recording.take(failed)
        self.outputs.put_nowait(Outputs(time.monotonic(), (failed,)))
        self.on_end(live, True)
        await self._leave_worker(live)

    async def lose(self, live: LiveRequest, epoch: int) -> None:
        """The worker of this epoch is gone, failed the request, or refused it: continue the request elsewhere, or fail
        it. Does nothing if the epoch is over already."""
        worker = live.log.give_up(epoch) if self.requests.is_live(live) else None
        if worker is None:
            return
        recovery = live.recovery
        recovery.lose(worker, live.log.position)
        live.migration.wake()
        self.trials.end(live)
        # A prefill worker that is lost is no reason to change the decode worker.
        decode_worker = live.prefill.decode_worker if live.prefill.job is not None else None
        self.remote_prefill.leave_job(live)
        # The worker may only be cut off, and still compute.
        await self._link.cancel(worker, RequestEpoch(live.request_id, epoch))
        why = verdict_after_loss(live.log.position, live.request.survival, recovery.fruitless, self._deadlines)
        if recovery.standing.guilty:
            await self.fail(live, recovery.standing.guilt, "deaths")
        elif why is None:
            await self.place(live, decode_worker)
        else:
            await self.fail(live, why)

    async def place(self, live: LiveRequest, preferred: str | None = None) -> None:
        """Find a worker for the request and hand it over, or fail the request. Never raises.

        `preferred` is the lease of the worker to take, if it is still routable.
        """
        try:
            await self._place(live, preferred)
        except (BusError, DecodeError) as error:
            await self.fail(live, f"the request could not be handed to a worker: {error}")
        except Exception:  # noqa: BLE001
            # The boundary of a request: what is wrong with one must not end the process, and so all others.
            _log.exception("request %s could not be placed", live.request_id)
            await self.fail(live, "the request could not be prepared for a worker")

    async def _place(self, live: LiveRequest, preferred: str | None) -> None:
        if live.recovery.standing.suspect:
            await self._place_alone(live)
            return
        worker = preferred if self.placer.is_routable(preferred) else None
        if worker is None:
            worker = await self.placer.assign(live)
        if worker is None:
            await self.fail(live, "no worker is ready to take the request; try again later")
        elif not await self.remote_prefill.offer(live, worker):
            await self._give(live, worker)

    async def _place_alone(self, live: LiveRequest) -> None:
        """Give a suspect request to a worker that is set apart for it. That worker computes the prompt, too, so that no
        other engine takes part."""
        await self.remote_prefill.release(live)
        worker = await self.trials.worker_for(live)
        if worker is None:
            suspicion = live.recovery.standing.suspicion
            await self.fail(live, f"{suspicion}, and no worker could be set apart to try it alone; try again later")
            return
        await self.placer.reassign(live, worker)
        await self._give(live, worker)

    async def _give(self, live: LiveRequest, worker: str) -> None:
        """Hand the request to the worker that is to finish it."""
        if not self.requests.is_live(live):
            await self.placer.release(live)
            return
        current = live.log.assign(worker)
        await self.placer.send(live, current, worker)
        # If the worker left while the submission was prepared, the fleet's change came before the request was its own.
        if self._fleet.view.get(worker) is None:
            await self.lose(live, current.epoch)

    async def _leave_worker(self, live: LiveRequest) -> None:
        """Free all that workers keep for a request that has ended."""
        self.remote_prefill.leave_job(live)
        live.migration.wake()
        self.trials.end(live)
        await self.placer.release(live)
        if live.log.worker is not None:
            await self._link.cancel(live.log.worker, live.log.current)
        await self.remote_prefill.release(live)


# Tries suspect requests: one at a time, each alone on a worker that is set apart for it. Which requests are suspect,
# and what comes of a trial, is decided in core/request/recovery.py.
#
# A worker that is set apart says so in its presence. Nothing is routed there then, and every frontend migrates away the
# requests that it has there (migration/scheduler.py). In a graph with one worker the other requests wait meanwhile, for
# as long as a request that lost its worker waits.


class Trials:
    """The trials of one frontend's suspect requests."""

    def __init__(
        self,
        requests: LiveRequests,
        link: WorkerLink,
        fleet: FleetWatch,
        tasks: TaskGuard,
        deadlines: RecoveryDeadlines,
    ) -> None:
        self._requests = requests
        self._link = link
        self._fleet = fleet
        self._tasks = tasks
        self._deadlines = deadlines
        self._waiting: list[LiveRequest] = []
        """Suspects in the order in which they are tried."""
        self._tried: LiveRequest | None = None
        self._changed = asyncio.Event()
        """Set when the fleet or `_waiting` changes, and then replaced."""

    def start(self) -> None:
        """Follow the fleet from now on."""
        self._fleet.subscribe(self._on_change)

    async def worker_for(self, live: LiveRequest) -> str | None:
        """Wait until the suspect may be tried, and a worker is free for it. Return that worker: the trial begins. None
        if there was no worker in time, or the request has ended."""
        deadline = time.monotonic() + self._deadlines.recovery_s
        self._waiting.append(live)
        try:
            return await self._worker_for(live, deadline)
        finally:
            self._waiting = [other for other in self._waiting if other is not live]
            self._wake()

    def end(self, live: LiveRequest) -> None:
        """End the request's trial or its wait for one: it has ended, is cleared, or has lost its worker."""
        if self._tried is live:
            self._tried = None
            self._tasks.spawn("end of a trial", self.tidy())
        if self._waiting:
            self._wake()

    async def tidy(self) -> None:
        """Have workers take requests again that are set apart for none any more. Call from time to time: the message
        may be lost."""
        wanted = {live.request_id for live in (self._tried, *self._waiting[:1]) if live is not None}
        for worker in self._fleet.view.exclusive():
            exclusive = worker.exclusive
            if exclusive is None or exclusive.frontend != self._link.frontend:
                continue
            if exclusive.request_id not in wanted:
                await self._link.end_exclusive(worker.lease, exclusive.request_id)

    async def _worker_for(self, live: LiveRequest, deadline: float) -> str | None:
        asked: str | None = None
        while self._requests.is_live(live) and (remaining := deadline - time.monotonic()) > 0:
            # Taken before looking, so that no change between the look and the wait is missed.
            changed = self._changed
            if self._tried is None and self._waiting[0] is live:
                await self.tidy()
                workers, recovery = self._fleet.view.ready(), live.recovery
                step = next_step(live.request_id, self._link.frontend, workers, asked, recovery.avoid)
                match step:
                    case Begin():
                        _log.warning("request %s is tried alone: %s", live.request_id, recovery.standing.suspicion)
                        self._tried = live
                        return step.worker
                    case Ask():
                        asked = step.worker
                        await self._link.ask_exclusive(asked, live.request_id)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, self._deadlines.ask_again_s)):
                    await changed.wait()
        return None

    def _on_change(self, _: Change) -> None:
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
