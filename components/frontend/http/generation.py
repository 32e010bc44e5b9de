"""Requests that generate: admitted to their model, held while that has no worker, and passed on to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from components.frontend.http.body import ClientGoneError
from components.frontend.http.early_errors import with_early_errors
from components.frontend.http.held import EarlyAnswer, watched
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.outgoing import with_stream_headers
from dynamo_local.core.http.admission import Demand, Refusal, examine
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.holding import GiveUp, Go, Held, Unready, Wait, next_step, refused

_log = logging.getLogger(__name__)

RETRY_BUSY_S = 1
RETRY_NO_WORKER_S = 2

DRAINING = Unready("the server is shutting down", comes=False)

_FIRST_TOKEN = "waiting for the first token"


@dataclass(frozen=True)
class GenerationRequest:
    """A request that generates. `fields`: of its body. `streams`: it asks for a stream of events."""

    scope: Scope
    fields: dict[str, Any]
    streams: bool


class Generations:
    """Carries out requests that generate. `under_way`: their number, those that are held included."""

    def __init__(
        self, models: ModelTable, is_draining: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models = models
        self._is_draining = is_draining
        self._clock = clock
        self.under_way = 0

    async def serve(
        self,
        request: GenerationRequest,
        receive: Receive,
        after_body: Receive,
        send: Send,
        changed: Callable[[Send], Send],
    ) -> Refusal | None:
        """Have the model that the request asks for answer it. Return a refusal instead if it is not admitted.

        `receive` gives the body again, `after_body` only what comes after it. `changed` makes the changes of answers.
        Raises ClientGoneError.
        """
        admitted = self._admit(request)
        if isinstance(admitted, Refusal):
            return admitted
        entry, demand = admitted
        unready = self._unready(entry)
        if unready is not None and (why := refused(unready, len(entry.line), entry.limits)) is not None:
            return unavailable(why)
        early = EarlyAnswer(send, request.scope["path"])
        self.under_way += 1
        try:
            if unready is None:
                # Nothing was awaited since the model was chosen: what is admitted for a model is counted there.
                entry.enter(demand.sequences)
            else:
                found = await self._hold(request, entry, demand, after_body, early)
                if isinstance(found, Refusal):
                    return await early.refuse(found)
                entry, demand = found
            await self._run(request, entry, demand, receive, early, changed)
        finally:
            self.under_way -= 1
        return None

    async def _run(
        self,
        request: GenerationRequest,
        entry: ModelEntry,
        demand: Demand,
        receive: Receive,
        early: EarlyAnswer,
        changed: Callable[[Send], Send],
    ) -> None:
        """Pass on a request that has entered."""
        try:
            assert entry.app is not None, "a model without an application is not ready"
            with early.commented(lambda: _FIRST_TOKEN):
                outgoing = with_stream_headers(changed(early))
                await entry.app(request.scope, receive, with_early_errors(outgoing))
        finally:
            entry.leave(demand.sequences)

    async def _hold(
        self, request: GenerationRequest, entry: ModelEntry, demand: Demand, after_body: Receive, early: EarlyAnswer
    ) -> tuple[ModelEntry, Demand] | Refusal:
        """Hold a request until it has entered its model, which is returned, or is refused. Raises ClientGoneError."""
        held = Held(demand.sequences, self._clock(), request.streams)
        entry.hold(held)
        if len(entry.line) == 1:
            _log.info("requests for %s wait: %s", _name(entry), self._why(entry))
        try:
            with watched(after_body) as gone:
                while True:
                    step = next_step(held, self._unready(entry), entry.limits, self._clock())
                    if isinstance(step, Go):
                        entry.enter(held.sequences)
                        return entry, Demand(held.sequences)
                    if isinstance(step, GiveUp):
                        return unavailable(step.why)
                    await self._wait(held, entry, step, gone, early)
                    # The model may have got another revision, with other limits.
                    found = self._admit(request, entry)
                    if isinstance(found, Refusal):
                        return found
                    if found[0] is not entry:
                        entry.release(held)
                        entry, held.sequences = found[0], found[1].sequences
                        entry.hold(held)
        finally:
            entry.release(held)
            if not len(entry.line):
                _log.info("no request for %s waits any more", _name(entry))

    async def _wait(
        self, held: Held, entry: ModelEntry, step: Wait, gone: asyncio.Future[None], early: EarlyAnswer
    ) -> None:
        if step.tell:
            held.told_at = self._clock()
            await early.tell(f"waiting for a worker of {_name(entry)}: {self._why(entry)}")
        else:
            await entry.line.wait(held, gone, step.until - self._clock())
        if gone.done():
            raise ClientGoneError

    def _admit(
        self, request: GenerationRequest, holder: ModelEntry | None = None
    ) -> tuple[ModelEntry, Demand] | Refusal:
        """Find the model that a request asks for, and what it occupies there. `holder`: where it is held already."""
        entry = self._models.asked(request.fields, request.scope["path"])
        if isinstance(entry, Refusal):
            return entry
        if entry is holder:
            return entry, Demand(0)
        demand = examine(request.fields, entry.limits)
        if isinstance(demand, Refusal):
            return demand
        if entry.demand + demand.sequences > entry.limits.max_requests:
            return _busy(entry, demand.sequences)
        return entry, demand

    def _unready(self, entry: ModelEntry) -> Unready | None:
        return DRAINING if self._is_draining() else entry.unready()

    def _why(self, entry: ModelEntry) -> str:
        unready = self._unready(entry)
        return "it is ready" if unready is None else unready.why


def unavailable(why: str) -> Refusal:
    """Return the refusal of a request that may be sent again later."""
    return Refusal(503, why, "ServiceUnavailableError", retry_after_s=RETRY_NO_WORKER_S)


def _busy(entry: ModelEntry, asked: int) -> Refusal:
    why = (
        f"{entry.demand} of at most {entry.limits.max_requests} sequences (setting max-requests) are under way, "
        f"{asked} asked for"
    )
    return Refusal(429, why, "RateLimitError", retry_after_s=RETRY_BUSY_S)


def _name(entry: ModelEntry) -> str:
    return next(iter(entry.names), "the model")
