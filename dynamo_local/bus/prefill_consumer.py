"""Taking jobs from the prefill queue.

A job taken is in hand: nobody else gets it for as long as it is kept alive. It leaves the queue when its taker says
so, and comes again, to whoever pulls, when nothing is heard of it for `ACK_WAIT_S`. So a job may be delivered more
than once, also to a taker that has done it and whose word was lost; claiming it at its frontend decides.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from nats.js import api

from dynamo_local.bus.jetstream import AGAIN, DONE, NEVER, PROGRESS, delivery_count
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.prefill_queue import ACK_WAIT_S, CONSUMER, PrefillQueue
from dynamo_local.bus.subscriptions import Message
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError, QueueAbsentError
from dynamo_local.core.messages.prefill import PrefillJob
from dynamo_local.core.names import Subjects
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)

_CONFIRM_S = 2.0
_PULL_S = 1.0
"""How long one pull waits at the server. A server that restarts forgets it, so it is short."""
_GRACE_S = 0.5
"""How long after its end the server's word that a pull has ended is waited for."""
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_FRESH_S = ACK_WAIT_S * 0.6
"""A job that has lain here for longer unseen may soon be somebody else's."""
_NANO = 1_000_000_000


class TakenJob:
    """A job in hand. `delivery` is 1 when it is delivered for the first time.

    None of the calls raises: where the server does not confirm, the job may come again, which its taker is ready for
    in any case.
    """

    def __init__(self, bus: Bus, job: PrefillJob, reply: str, arrived_at: float) -> None:
        self.job = job
        self.delivery = delivery_count(reply)
        self.arrived_at = arrived_at
        self._bus = bus
        self._reply = reply
        self._settled = False

    async def keep_alive(self) -> None:
        """Still at it. To be said every `KEEP_ALIVE_S`; nothing after the job's end."""
        if self._settled:
            return
        try:
            await self._bus.publish(self._reply, PROGRESS)
        except BusError as error:
            _log.debug("job %s not kept alive: %s", self.job.job, error)

    async def done(self) -> None:
        """It has been worked off."""
        await self._settle(DONE, "done")

    async def end(self, reason: str) -> None:
        """It is not to be done, by nobody: the reason is for the log."""
        await self._settle(NEVER, f"ended ({reason})")

    async def give_back(self) -> None:
        """Somebody else may have it, at once."""
        await self._settle(AGAIN, "given back")

    async def _settle(self, word: bytes, what: str) -> None:
        self._settled = True
        _log.debug("job %s of request %s: %s", self.job.job, self.job.request_id, what)
        try:
            await self._bus.request(self._reply, word, timeout_s=_CONFIRM_S)
        except BusError as error:
            _log.warning("job %s: that it is %s is not confirmed, it may come again: %s", self.job.job, what, error)


@dataclass
class _Pull:
    """A request for jobs. The server tells its end, if jobs do not end it, on `subject`; `ended` is what it said."""

    subject: str
    ended: str | None = None


class PrefillConsumer:
    """Takes jobs for one worker process. After `close` it may be used again."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.garbage = 0
        """Messages that could not be understood, and were ended."""
        self._bus = bus
        self._queue = PrefillQueue(bus, subjects)
        self._next = f"{api.DEFAULT_PREFIX}.CONSUMER.MSG.NEXT.{subjects.prefill_stream}.{CONSUMER}"
        self._inbox = bus.inbox()
        self._numbers = itertools.count(1)
        self._listens = False
        self._closed = False
        self._arrived: deque[TakenJob] = deque()
        self._pull = _Pull("")
        self._heard = 0
        """Messages that arrived, garbage included: each is an answer to a pull."""
        self._news = asyncio.Event()
        self._trouble = LogOnce(_log)

    async def take(self, batch: int, timeout_s: float) -> list[TakenJob]:
        """Jobs, as soon as there is one, at most `batch`; none if none came in time or NATS is down.

        Raises QueueAbsentError if there is still no queue at the end of the time, never sooner, so that a loop around
        this is not hot. For one caller at a time. Whoever cancels it calls `close`, or takes again.
        """
        deadline = time.monotonic() + timeout_s
        await self._listen()
        pauses = _pauses()
        while not self._drop_stale():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                await self._fail_if_absent()
                return []
            wait_s = min(remaining_s, _PULL_S)
            pulled_at = time.monotonic()
            await self._pull_jobs({"batch": 1, "expires": int(wait_s * _NANO)}, 1, wait_s + _GRACE_S)
            # A pull that the server ends before its time has failed: no queue, no server, too many pulls.
            if self._pull.ended is not None and time.monotonic() - pulled_at < wait_s / 2:
                await asyncio.sleep(min(next(pauses), max(0.0, deadline - time.monotonic())))
        missing = batch - len(self._arrived)
        if missing > 0:
            await self._pull_jobs({"batch": missing, "no_wait": True}, missing, _GRACE_S)
        return [self._arrived.popleft() for _ in range(min(batch, len(self._arrived)))]

    async def close(self) -> None:
        """Take no more, and give back at once what `take` has not returned."""
        # The subscription stays: a pull that was cancelled is at the server for up to a second more, which may deliver
        # to it though nobody listens any more. What it brings is given back, too.
        self._closed = True
        unseen, self._arrived = self._arrived, deque()
        await asyncio.gather(*(job.give_back() for job in unseen))

    async def _listen(self) -> None:
        self._closed = False
        if not self._listens:
            self._listens = True
            await self._bus.subscribe(f"{self._inbox}.*", self._on_message)

    async def _pull_jobs(self, request: dict[str, object], wanted: int, within_s: float) -> None:
        """Ask for jobs, and wait until `wanted` messages have arrived or the server says that it is over."""
        pull = self._pull = _Pull(f"{self._inbox}.{next(self._numbers)}")
        if not self._bus.connected:
            pull.ended = "not connected"
            return
        enough = self._heard + wanted
        try:
            await self._bus.publish(self._next, json.dumps(request).encode(), reply=pull.subject)
            async with asyncio.timeout(within_s):
                while pull.ended is None and self._heard < enough:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pull.ended = "silence"
        except BusError as error:
            pull.ended = str(error)

    async def _on_message(self, message: Message) -> None:
        if message.status:
            if message.subject == self._pull.subject:
                self._pull.ended = message.status
        else:
            self._heard += 1
            await self._on_job(message)
        self._news.set()

    async def _on_job(self, message: Message) -> None:
        try:
            job = codec.decode(message.data, PrefillJob)
        except DecodeError as error:
            self.garbage += 1
            _log.warning("a message in the prefill queue is no job and is dropped: %s", error)
            await self._bus.publish(message.reply, NEVER)
            return
        taken = TakenJob(self._bus, job, message.reply, time.monotonic())
        if self._closed:
            await taken.give_back()
        else:
            self._arrived.append(taken)

    def _drop_stale(self) -> bool:
        """Forget jobs that arrived too long ago, which are delivered again. Returns whether there are others."""
        oldest = time.monotonic() - _FRESH_S
        while self._arrived and self._arrived[0].arrived_at < oldest:
            self._arrived.popleft()
        return bool(self._arrived)

    async def _fail_if_absent(self) -> None:
        if self._pull.ended in (None, api.StatusCode.REQUEST_TIMEOUT):
            self._trouble.over()
            return
        try:
            await self._queue.length()
        except QueueAbsentError:
            raise
        except BusError as error:
            self._trouble.note(f"no prefill jobs can be taken: {error}")


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
