"""Requests whose prompt another worker prefills: from the offer to the hand-over.

    offered    a job is in the prefill queue, the decode worker is charged, nobody works on the request
    granted    a prefill worker has claimed it, and got it under an epoch of its own
    held       its first token is here, its KV is kept there; the decode worker has it under the next epoch

Each may end at any time, and the request then goes to its decode worker as if there were no prefill workers. A job
that the queue delivers after that is refused.

Requests with the same prompt that come while one is offered or granted (the choices of one with n > 1) share its job:
they wait for the KV, and draw their first tokens from it at their own decode workers. If nothing comes of the job they
are offered anew, or go on alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from components.frontend.prefill_jobs import HOLD_S, Held, Job, PrefillJobs
from components.frontend.requests import LiveRequest, Placer
from dynamo_local.bus.nats import Message
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.messages.prefill import PrefillClaim, PrefillGrant
from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import Cancel, RequestEpoch, Submit
from dynamo_local.core.ports import Request
from dynamo_local.core.request.fidelity import Fidelity
from dynamo_local.core.request.log import Verdict
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


class RemotePrefill:
    """The part of a dispatcher that deals with prefill workers.

    `live` are the dispatcher's requests; `tell` has it say something to a worker, `place` has it place a request, on
    the worker named if that is still routable.
    """

    def __init__(
        self,
        remote: PrefillJobs,
        placer: Placer,
        live: Mapping[str, LiveRequest],
        tasks: TaskGuard,
        tell: Callable[[str, Cancel], Coroutine[Any, Any, None]],
        place: Callable[[LiveRequest, str | None], Coroutine[Any, Any, None]],
    ) -> None:
        self._remote = remote
        self._placer = placer
        self._live = live
        self._tasks = tasks
        self._tell = tell
        self._place = place

    async def start(self) -> None:
        """Begin to listen for claims."""
        await self._remote.answer_claims(self._on_claim)

    async def offer(self, live: LiveRequest, decode: str) -> bool:
        """Put the request into the prefill queue, if that is worth it. `decode`, its decode worker, stays charged."""
        remote, request = self._remote, live.request
        if live.log.position > 0 or live.held is not None or live.jobs >= remote.patience.jobs:
            return False
        queued = self._job_for(request) is not None
        if not await remote.wanted(request, decode, queued=queued) or not self._is_live(live):
            return False
        live.decode = decode
        live.jobs += 1
        if (shared := self._job_for(request)) is not None:
            remote.outcomes["shared"] += 1
            live.job = shared
            return True
        # Set before it is published: the claim may be here before the queue's confirmation.
        job = live.job = remote.job_for(request)
        try:
            await remote.publish(request, job)
        except BusError as error:
            _log.warning("request %s is not prefilled elsewhere: %s", live.request_id, error)
            return not self._unpublished(live, job)
        return True

    def take(self, live: LiveRequest, delta: TokenDelta) -> TokenDelta | None:
        """The end of a prefill, with the first token. That it ends there is its epoch's limit, not the client's,
        unless the client wants no more. Returns what the client gets of it.

        What cannot be continued elsewhere is not even begun: the token is dropped, and the decode worker draws it
        from the same KV.
        """
        job = live.job
        assert job is not None, "only who was granted the request sends tokens of it"
        if delta.finish == "error":
            _log.warning("request %s is not prefilled elsewhere: %s", live.request_id, delta.error)
            self._withdraw(job, "failed")
            return None
        if live.request.survival.fidelity is Fidelity.NONE:
            self._hand_over(job, self._sharing(job))
            return None
        goes_on = delta.finish == "length" and live.request.max_tokens != 1
        if goes_on:
            delta = msgspec.structs.replace(delta, finish=None)
        verdict, _ = live.log.accept(delta)
        if verdict is not Verdict.ACCEPTED:
            return None
        if delta.finish != "abort":
            self._hand_over(job, [other for other in self._sharing(job) if goes_on or other is not live])
        return delta

    def withdraw_overdue(self, now: float) -> None:
        """End the jobs that nobody has claimed, or worked off, in time."""
        jobs = {live.job.id: live.job for live in self._live.values() if live.job is not None}
        for job in jobs.values():
            if now > job.deadline:
                self._withdraw(job, "not claimed in time" if job.granted is None else "not computed in time")

    def leave(self, live: LiveRequest) -> None:
        """The request is over, or its prefill worker is lost: it has no share in its job any more. If the job was its
        own, that is the job's end, and those that share it are placed again."""
        job, live.job = live.job, None
        if job is None or job.request_id != live.request_id:
            return
        for other in self._sharing(job):
            other.job = None
            self._tasks.spawn(f"place {other.request_id}", self._place(other, other.decode))

    def still_holds(self, prefill: RequestEpoch) -> bool:
        """Whether somebody waits for the KV of this prefill."""
        return any(live.held is not None and live.held.request == prefill for live in self._live.values())

    # Claims

    async def _on_claim(self, message: Message) -> PrefillGrant | None:
        try:
            claim = codec.decode(message.data, PrefillClaim)
        except DecodeError as error:
            _log.warning("claim ignored: %s", error)
            return None
        return PrefillGrant(self._grant(claim))

    def _grant(self, claim: PrefillClaim) -> Submit | None:
        live = self._live.get(claim.request_id)
        job = None if live is None else live.job
        if live is None or job is None or job.id != claim.job:
            self._remote.outcomes["not wanted any more"] += 1
            return None
        job.claims += 1
        if max(job.claims, claim.delivery) > self._remote.patience.deliveries:
            self._withdraw(job, "delivered too often")
            return None
        if live.at_prefill_worker:
            # Delivered again, while its first taker may still be at it.
            self._dismiss(live)
        job.granted = live.log.assign(claim.worker)
        job.deadline = time.monotonic() + self._remote.patience.at_work_s
        return msgspec.structs.replace(self._placer.submission(live, job.granted, at_most=1), hold_s=HOLD_S)

    def _dismiss(self, live: LiveRequest) -> None:
        """Take the request from its prefill worker."""
        granted = live.log.current
        worker = live.log.give_up(granted.epoch)
        if worker is not None:
            self._tasks.spawn(f"dismiss {granted}", self._tell(worker, Cancel(requests=(granted,))))

    # Ways out

    def _unpublished(self, live: LiveRequest, job: Job) -> bool:
        """The queue has not confirmed the job. Returns whether that is its end, and the request is to be placed. It
        is not if a worker has claimed the job nevertheless, or if its end has been seen to."""
        if live.job is not job or job.granted is not None:
            return False
        live.job = None
        self._withdraw(job, "not queued")
        return True

    def _withdraw(self, job: Job, why: str) -> None:
        """Nobody prefills the prompt: the decode workers do."""
        self._remote.outcomes[why] += 1
        for live in self._sharing(job):
            if live.at_prefill_worker:
                self._dismiss(live)
            live.job = None
            live.jobs = self._remote.patience.jobs
            self._tasks.spawn(f"prefill {live.request_id} here", self._place(live, live.decode))

    def _hand_over(self, job: Job, sharing: list[LiveRequest]) -> None:
        """The prompt is prefilled, and its KV kept there: on to the decode workers of these."""
        self._remote.outcomes["prefilled elsewhere"] += 1
        owner = self._live[job.request_id]
        owner.job = None
        if not sharing:
            return
        prefill = owner.log.current
        source = owner.log.give_up(prefill.epoch)
        assert source is not None, "only tokens of the current epoch end a prefill"
        for live in sharing:
            live.job = None
            live.held = Held(source, prefill)
            self._tasks.spawn(f"hand over {live.request_id}", self._place(live, live.decode))

    def _job_for(self, request: Request) -> Job | None:
        """A job for the same prompt that is under way."""
        same = (
            live.job
            for live in self._live.values()
            if live.job is not None
            and live.request.cache_salt == request.cache_salt
            and live.request.adapter == request.adapter
            and live.request.prompt_token_ids == request.prompt_token_ids
        )
        return next(same, None)

    def _sharing(self, job: Job) -> list[LiveRequest]:
        return [live for live in self._live.values() if live.job is job]

    def _is_live(self, live: LiveRequest) -> bool:
        return self._live.get(live.request_id) is live
