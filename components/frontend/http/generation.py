"""Requests that generate: admitted to their model, held while that has no worker, and passed on to it.

A request that is to be held is examined first by the model's application, as far as that is built. What is wrong with
it is known then before anything is woken for it, and when a worker is ready its prompt is tokenized already.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from components.frontend.http.exchange import (
    RETRY_NO_WORKER_S,
    EarlyAnswer,
    EarlyCall,
    Exchange,
    GenerationRequest,
    pass_on,
    unavailable,
    watched,
)
from components.frontend.http.incoming import ClientGoneError
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.outgoing import Renaming
from components.frontend.http.usage import Metered, UsageMeter
from components.frontend.limits.rooms import Rooms
from components.frontend.request_context import caller_of, request_of
from dynamo_local.core.http.asgi import Receive, Send
from dynamo_local.core.http.bounds.admission import Demand, Refusal, examine
from dynamo_local.core.http.bounds.limits import LIMITED
from dynamo_local.core.http.waiting import GiveUp, Go, Held, Unready, next_step, refused
from dynamo_local.core.priority.classes import PriorityClass, may_come, share_of

_log = logging.getLogger(__name__)

DRAINING = Unready("the server is shutting down", comes=False)

_FIRST_TOKEN = "waiting for the first token"


@dataclass
class _Place:
    """Where a request is held now."""

    held: Held
    entry: ModelEntry


class _Entered(NamedTuple):
    """A request that was held has entered this model, which is not always the one that it came to."""

    entry: ModelEntry
    sequences: int


class Generations:
    """Carries out requests that generate."""

    def __init__(
        self,
        models: ModelTable,
        is_draining: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        meter: UsageMeter | None = None,
        rooms: Rooms | None = None,
    ) -> None:
        """`rooms`: what all frontends have under way; None: there is only this one."""
        self._rooms = rooms
        self._exclusively = nullcontext if rooms is None else rooms.exclusively
        self._models = models
        self._meter = meter or UsageMeter()
        self._is_draining = is_draining
        self._clock = clock
        self._under_way = 0

    @property
    def under_way(self) -> int:
        """Number of requests that generate, of all frontends, those that are held included."""
        return self._under_way if self._rooms is None else self._rooms.under_way

    async def serve(
        self, request: GenerationRequest, after_body: Receive, send: Send, renaming: Renaming
    ) -> Refusal | None:
        """Have the model that the request asks for answer it. Return a refusal instead if it is not admitted.

        `after_body` and `renaming` as in Exchange. Raises ClientGoneError.
        """
        admitted = self._admit(request)
        if isinstance(admitted, Refusal):
            return admitted
        entry, demand = admitted
        if (ticket := request_of(request.scope).ticket) is not None:
            ticket.note_demand(request.fields, demand)
        unready = self._unready(entry)
        if unready is not None and (step := self._not_held(request, entry, unready)) is not None:
            return refusal_of(step)
        # Nothing was awaited since the model was chosen; but another frontend may have taken the room.
        with self._exclusively():
            if not has_room(entry, request, demand.sequences):
                return self._full(entry, request, demand)
            entry.enter(demand.sequences, request.priority, request.key)
        with self._meter.of(request.scope, entry, request.model, as_told=request.searches_beams) as metered:
            exchange = Exchange(
                request, after_body, EarlyAnswer(metered.sending(send), request.scope["path"]), renaming
            )
            return await self._serve(exchange, entry, demand, unready, metered)

    async def _serve(
        self, exchange: Exchange, entry: ModelEntry, demand: Demand, unready: Unready | None, metered: Metered
    ) -> Refusal | None:
        self._count(1)
        try:
            if unready is None:
                exchange.early.note_cold(entry.conversations.answer(exchange.request.conversation))
                await self._run(exchange, _Entered(entry, demand.sequences))
                return None
            refusal = await self._serve_later(exchange, entry, demand)
            if refusal is not None:
                metered.refused(refusal.status)
            return refusal
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._under_way += change
        if self._rooms is not None:
            self._rooms.note_under_way(self._under_way)

    async def _run(self, exchange: Exchange, entered: _Entered) -> None:
        """Pass on a request that has entered."""
        entry = entered.entry
        try:
            assert entry.app is not None, "a model without an application is not ready"
            with exchange.early.commented(lambda: _FIRST_TOKEN):
                await pass_on(entry.app, exchange.request.scope, exchange.receive(), exchange.send())
        finally:
            entry.leave(entered.sequences, exchange.request.priority, exchange.request.key)

    async def _serve_later(self, exchange: Exchange, entry: ModelEntry, demand: Demand) -> Refusal | None:
        """Examine a request that has entered a model without a worker, hold it, and pass it on."""
        async with self._examined(exchange, entry, demand) as call:
            if call is not None and call.task.done():
                await call.task
                return None
            found = await self._hold(exchange, entry, demand, call)
            if isinstance(found, Refusal):
                return await exchange.early.refuse(found)
            if found is not None:
                await self._go_on(exchange, found, call)
        return None

    @asynccontextmanager
    async def _examined(self, exchange: Exchange, entry: ModelEntry, demand: Demand) -> AsyncIterator[EarlyCall | None]:
        """Have the application examine a request that has entered, which it then leaves. Gives the call, which has
        answered the request if something is wrong with it; None: the application is not built yet."""
        if entry.app is None:
            entry.leave(demand.sequences, exchange.request.priority, exchange.request.key)
            yield None
            return
        async with EarlyCall(entry.app, exchange.request.scope, exchange.receive(), exchange.send()) as call:
            try:
                await call.examined()
            finally:
                entry.leave(demand.sequences, exchange.request.priority, exchange.request.key)
            yield call

    async def _go_on(self, exchange: Exchange, entered: _Entered, call: EarlyCall | None) -> None:
        """Pass on a request that was held."""
        if call is None or call.app is not entered.entry.app:
            if call is not None:
                await call.end()
            await self._run(exchange, entered)
            return
        try:
            with exchange.early.commented(lambda: _FIRST_TOKEN):
                call.go_on()
                await call.answered()
        finally:
            await call.end()
            entered.entry.leave(entered.sequences, exchange.request.priority, exchange.request.key)

    async def _hold(
        self, exchange: Exchange, entry: ModelEntry, demand: Demand, call: EarlyCall | None
    ) -> _Entered | Refusal | None:
        """Hold a request until it has entered a model, or is refused. None: its call has answered it after all.

        Raises ClientGoneError.
        """
        request, unready = exchange.request, self._unready(entry)
        held = Held(demand.sequences, self._clock(), request.streams, request.priority, request.key)
        place = _Place(held, entry)
        with self._exclusively():
            if unready is not None and (step := self._not_held(request, entry, unready)) is not None:
                return refusal_of(step)
            if not has_room(entry, request, demand.sequences):
                return self._full(entry, request, demand)
            entry.hold(held)
        if len(entry.line) == 1:
            _log.info("requests for %s wait: %s", _name(entry), self._why(entry))
        outcome: _Entered | Refusal | None = None
        try:
            with watched(exchange.after_body) as gone:
                outcome = await self._wait(exchange, place, gone, call)
        finally:
            place.entry.release(held)
            self._note_end(place, outcome)
        return outcome

    async def _wait(
        self, exchange: Exchange, place: _Place, gone: asyncio.Future[None], call: EarlyCall | None
    ) -> _Entered | Refusal | None:
        """Wait until a request that is held may go on, as `_hold`. It is still held when this returns."""
        held, ends = place.held, [gone] if call is None else [gone, call.task]
        while True:
            entry = place.entry
            held.woken_from = entry.woken_from or held.woken_from
            step = next_step(held, self._unready(entry), entry.limits, self._clock())
            if isinstance(step, Go):
                entry.enter(held.sequences, held.priority, held.key)
                exchange.early.note_hold(held.woken_from, self._clock() - held.since)
                exchange.early.note_cold(entry.conversations.answer(exchange.request.conversation))
                return _Entered(entry, held.sequences)
            if isinstance(step, GiveUp):
                return refusal_of(step)
            if step.tell:
                held.told_at = self._clock()
                exchange.early.note_woken(held.woken_from)
                is_known = entry.conversations.is_known(exchange.request.conversation)
                exchange.early.note_cold(is_known and held.woken_from != "")
                await exchange.early.tell(f"waiting for a worker of {_name(entry)}: {self._why(entry)}")
            else:
                await entry.line.wait(held, ends, step.until - self._clock())
            if gone.done():
                raise ClientGoneError
            if call is not None and call.task.done():
                await call.task
                return None
            if (refusal := self._follow(exchange.request, place)) is not None:
                return refusal

    def _follow(self, request: GenerationRequest, place: _Place) -> Refusal | None:
        """Hold a request where its model is now: that may have got another revision, with other limits."""
        found = self._admit(request, place.entry)
        if isinstance(found, Refusal):
            return found
        if found[0] is not place.entry:
            place.entry.release(place.held)
            place.entry, place.held.sequences = found[0], found[1].sequences
            place.entry.hold(place.held)
        return None

    def _note_end(self, place: _Place, outcome: _Entered | Refusal | None) -> None:
        held, model = place.held, _name(place.entry)
        became = "served" if isinstance(outcome, _Entered) else "refused" if isinstance(outcome, Refusal) else "left"
        self._models.hold_times.note(model, held.woken_from, became, self._clock() - held.since)
        if not len(place.entry.line):
            _log.info("no request for %s waits any more", model)

    def _not_held(self, request: GenerationRequest, entry: ModelEntry, unready: Unready) -> GiveUp | None:
        """Return why a request is not held. Has the model's endpoint woken for the next one then, if that helps."""
        step = not_held(entry, request, unready)
        if step is None:
            return None
        if step.full:
            self._models.note_refused(entry, request.priority_class, "max-held")
        if entry.waking is None:
            return step
        entry.waking.knock()
        return not_held(entry, request, self._unready(entry) or unready)

    def _admit(
        self, request: GenerationRequest, holder: ModelEntry | None = None
    ) -> tuple[ModelEntry, Demand] | Refusal:
        """Find the model that a request asks for, and what it occupies there. `holder`: where it is held already."""
        entry = self._models.asked(request.fields, request.scope["path"], caller_of(request.scope).allows)
        if isinstance(entry, Refusal):
            return entry
        if entry is holder:
            return entry, Demand(0)
        demand = examine(request.fields, entry.limits)
        if isinstance(demand, Refusal):
            return demand
        if has_room(entry, request, demand.sequences):
            return entry, demand
        return self._full(entry, request, demand)

    def _full(self, entry: ModelEntry, request: GenerationRequest, demand: Demand) -> Refusal:
        self._models.note_refused(entry, request.priority_class, "max-requests")
        return busy(entry, request, demand.sequences)

    def _unready(self, entry: ModelEntry) -> Unready | None:
        return DRAINING if self._is_draining() else entry.unready()

    def _why(self, entry: ModelEntry) -> str:
        unready = self._unready(entry)
        return "it is ready" if unready is None else unready.why


def _name(entry: ModelEntry) -> str:
    return next(iter(entry.names), "the model")


# Whether a model has room for a request that generates, and the refusal of one for which it has none.

RETRY_BUSY_S = 1
"""Seconds until a client that was refused for want of room may ask again."""


def has_room(entry: ModelEntry, request: GenerationRequest, asked: int) -> bool:
    """Return whether as many sequences as are asked for may come beside those that are under way."""
    return may_come(asked, request.key, request.priority_class, entry.limits.max_requests, *entry.taken)


def busy(entry: ModelEntry, request: GenerationRequest, asked: int) -> Refusal:
    """Return the refusal of a request for which there is no room: who is ahead of it, and how much its key has."""
    one, lowest = request.priority_class, tuple(PriorityClass)[-1]
    ahead, all_of_them = (sum(part.ahead(each) for part in entry.taken) for each in (one, lowest))
    of_these = "" if ahead == all_of_them else f" of priority {one} or higher"
    bound = entry.limits.max_requests
    share = share_of(request.key, one, bound, *entry.taken)
    of_key = f", {share.has} of them with this key, whose share is {share.share}" if share.keys > 1 else ""
    under_way = f"{ahead} of at most {bound} sequences{of_these} (setting max-requests) are under way"
    return _limited(f"{under_way}{of_key}, {asked} asked for", RETRY_BUSY_S)


def not_held(entry: ModelEntry, request: GenerationRequest, unready: Unready) -> GiveUp | None:
    """Return why a request that has just come is not held; None: it may be."""
    one, most = request.priority_class, entry.limits.max_held
    waiting = sum(part.ahead(one) for part in entry.held)
    return refused(unready, waiting, entry.limits, has_room=may_come(1, request.key, one, most, *entry.held))


def refusal_of(step: GiveUp) -> Refusal:
    """Return the refusal of a request that is not held, or no longer."""
    if step.full:
        return _limited(step.why, RETRY_NO_WORKER_S)
    return unavailable(step.why, retry_s=None if step.for_good else RETRY_NO_WORKER_S)


def _limited(why: str, retry_s: int) -> Refusal:
    """Return a refusal as OpenAI's for a limit."""
    return Refusal(429, why, "requests", retry_after_s=retry_s, code=LIMITED)
