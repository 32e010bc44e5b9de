"""The prefill queue: jobs that frontends publish and prefill workers take (bus/jetstream/prefill_queue.py).

The queue is a work-queue stream of JetStream on disk: a job is kept until a worker acknowledges that it is done,
whichever process dies meanwhile. Each priority class has a subject and a consumer of its own in it. Only the queue's
owner, `dynamo serve`, creates it: a reader that created a missing queue would report a plausible length of zero.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType

from dynamo_local.bus import without_websockets  # noqa: F401

# isort: split
from nats.js import api

from dynamo_local.bus.jetstream.streams import (
    AGAIN,
    DONE,
    NEVER,
    PROGRESS,
    ConsumerState,
    JetStream,
    QueueLimits,
    StreamAbsentError,
    StreamFullError,
    delivery_count,
)
from dynamo_local.bus.nats import Bus, RawMessage, Subscription
from dynamo_local.core import codec
from dynamo_local.core.errors import BusDownError, BusError, DecodeError, QueueAbsentError, QueueFullError
from dynamo_local.core.messages.work import PrefillJob, QueueLength
from dynamo_local.core.priority.classes import PriorityClass, class_of
from dynamo_local.core.priority.fair_queue import Turns
from dynamo_local.core.subjects import Subjects
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)

ACK_WAIT_S = 5.0
"""A job that its worker has not kept alive for so long is delivered again."""
KEEP_ALIVE_S = ACK_WAIT_S / 4
"""How often a worker keeps its jobs alive."""
CONSUMERS: Mapping[PriorityClass, str] = MappingProxyType({one: f"workers-{one}" for one in PriorityClass})
"""The durable consumers, one for the jobs of each priority class. All prefill workers pull from all of them."""

LIMITS = QueueLimits(
    # Far beyond any sensible max-prefill-queue-size: jobs whose frontends have died must fit as well.
    messages=10_000,
    # Request ids may come from clients, in a header, and be long.
    message_bytes=64 * 1024,
    # Workers drop jobs past their deadlines of seconds to minutes. This bound is for jobs that no worker takes.
    age_s=3600.0,
    ack_wait_s=ACK_WAIT_S,
)
_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue. `job` is None if it cannot be decoded. `taken`: whether it was delivered before."""

    sequence: int
    job: PrefillJob | None
    age_s: float
    taken: bool


class PrefillQueue:
    """The queue of one namespace, for publishers and operators (workers use PrefillConsumer). Keeps no state.

    Each call raises QueueAbsentError when there is no queue, BusError when NATS does not answer in time.
    """

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._stream = JetStream(bus, timeout_s=_TIMEOUT_S)
        self._name = subjects.prefill_stream
        self._subjects = subjects
        self._namespace = subjects.namespace

    async def publish(self, job: PrefillJob) -> None:
        """Queue a job. Raises QueueFullError. After another BusError the job may be queued nevertheless: its claim must
        be refused then."""
        with self._errors():
            subject = self._subjects.prefill_jobs(class_of(job.priority))
            await self._stream.append(self._name, subject, codec.encode(job))

    async def length(self) -> QueueLength:
        """The number of jobs."""
        states = (await self._states()).values()
        return QueueLength(sum(state.waiting for state in states), sum(state.in_hand for state in states))

    async def waiting(self) -> dict[PriorityClass, int]:
        """The number of jobs of each class that were never delivered."""
        return {one: state.waiting for one, state in (await self._states()).items()}

    async def jobs(self, limit: int) -> list[QueuedJob]:
        """Read the oldest jobs, without taking them."""
        found: list[QueuedJob] = []
        states = await self._states()
        delivered = {self._subjects.prefill_jobs(one): state.delivered for one, state in states.items()}
        with self._errors():
            sequence = 1
            while len(found) < limit:
                message = await self._stream.next_message(self._name, self._subjects.all_prefill_jobs, sequence)
                if message is None:
                    break
                taken = message.sequence <= delivered.get(message.subject, 0)
                found.append(QueuedJob(message.sequence, _decoded(message.data), message.age_s, taken))
                sequence = message.sequence + 1
        return found

    async def purge(self) -> int:
        """Drop all jobs and return how many. Workers finish the jobs that they have taken."""
        with self._errors():
            return await self._stream.purge(self._name)

    async def _states(self) -> dict[PriorityClass, ConsumerState]:
        with self._errors():
            states = await asyncio.gather(*(self._stream.state(self._name, name) for name in CONSUMERS.values()))
        return dict(zip(CONSUMERS, states, strict=True))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except StreamAbsentError as error:
            raise QueueAbsentError(
                f"namespace {self._namespace} has no prefill queue",
                "`dynamo serve` creates it for graphs with a prefill service",
            ) from error
        except StreamFullError as error:
            raise QueueFullError(f"the prefill queue of {self._namespace} takes no more jobs") from error


async def create_prefill_queue(bus: Bus, subjects: Subjects, limits: QueueLimits = LIMITS) -> None:
    """Create an empty queue, for the owner alone. Replaces a queue left by an earlier owner, jobs included. Raises
    BusError."""
    stream = JetStream(bus, timeout_s=_TIMEOUT_S)
    consumers = {name: subjects.prefill_jobs(one) for one, name in CONSUMERS.items()}
    await stream.create_queue(subjects.prefill_stream, consumers, limits)


async def delete_prefill_queue(bus: Bus, subjects: Subjects) -> bool:
    """Delete the queue, for the owner alone. Returns False if there was none. Raises BusError."""
    return await JetStream(bus, timeout_s=_TIMEOUT_S).delete(subjects.prefill_stream)


def _decoded(data: bytes) -> PrefillJob | None:
    try:
        return codec.decode(data, PrefillJob)
    except DecodeError:
        return None


# Takes jobs from the prefill queue for a worker.
#
# No other worker gets a job for as long as it is kept alive. A job leaves the queue when its worker acknowledges it,
# and is delivered again, to any worker, when nothing is heard of it for `ACK_WAIT_S`. So a job may be delivered more
# than once, also to a worker that has done it and whose acknowledgement was lost: its frontend decides, by the claim.

# isort: split


_CONFIRM_S = 2.0
"""Deadline of the server's confirmation that it has got an acknowledgement."""
_PULL_S = 15.0
"""How long one pull request waits at the server."""
_LOOK_S = 1.0
"""Between two looks whether the connection is another one by now: a server that restarts forgets pull requests."""
_ABSENT_S = 1.0
"""For pull requests to fail before it is asked whether there is a queue."""
_GRACE_S = 0.5
"""How long the server's notice that a pull request has expired may be late."""
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
"""Pauses between pull requests that fail at once grow from the first to the longest."""
_FRESH_S = ACK_WAIT_S * 0.6
"""A job that has lain here for longer, not kept alive, is about to be delivered again, and dropped here."""
_NANO = 1_000_000_000
_NO_MESSAGES = (api.StatusCode.NO_MESSAGES, api.StatusCode.REQUEST_TIMEOUT)


class TakenJob:
    """A job that this worker has taken. `delivery` is 1 for the first delivery of the job.

    None of the calls raises: if the server does not confirm, the job may be delivered again, for which workers must be
    prepared in any case.
    """

    def __init__(self, bus: Bus, job: PrefillJob, reply: str, arrived_at: float) -> None:
        self.job = job
        self.delivery = delivery_count(reply)
        self.arrived_at = arrived_at
        self._bus = bus
        self._reply = reply
        self._settled = False

    @property
    def least_age_s(self) -> float:
        """The job has been published for at least so long, by the number of its deliveries: no clock that this process
        shares with its frontend says how long."""
        return (self.delivery - 1) * ACK_WAIT_S

    async def keep_alive(self) -> None:
        """Tell the queue that the job is being worked on. To be called every `KEEP_ALIVE_S`."""
        if self._settled:
            return
        try:
            await self._bus.publish(self._reply, PROGRESS)
        except BusError as error:
            _log.debug("job %s not kept alive: %s", self.job.job, error)

    async def done(self) -> None:
        """Remove the job from the queue: it is done."""
        await self._settle(DONE, "done")

    async def end(self, reason: str) -> None:
        """Terminate the job: it is not redelivered. `reason` is for the log."""
        await self._settle(NEVER, f"ended ({reason})")

    async def give_back(self) -> None:
        """Return the job to the queue, to be delivered again at once."""
        await self._settle(AGAIN, "given back")

    async def _settle(self, acknowledgement: bytes, what: str) -> None:
        self._settled = True
        _log.debug("job %s of request %s: %s", self.job.job, self.job.request_id, what)
        try:
            await self._bus.request(self._reply, acknowledgement, timeout_s=_CONFIRM_S)
        except BusError as error:
            _log.warning("job %s is %s, which NATS has not confirmed; it may come again: %s", self.job.job, what, error)


@dataclass
class _Pull:
    """Pull requests, `open` of them, that are answered on `subject`. If all have ended otherwise than by messages, or
    one for another reason than time, `ended` is the status by which the server says so."""

    subject: str
    open: int = 1
    ended: str | None = None

    @property
    def failed(self) -> bool:
        """Whether they have ended for another reason than that there is no message."""
        return self.ended not in (None, *_NO_MESSAGES)

    def end(self, status: str) -> None:
        """Note that one of them has ended."""
        self.open -= 1
        if self.open <= 0 or status not in _NO_MESSAGES:
            self.ended = self.ended or status


class PrefillConsumer:
    """Takes jobs for one worker process. After `close` it may be used again."""

    # Not by nats-py's PullSubscription.fetch (2.16, nats/js/client.py), for three reasons. A fetch that is cancelled
    # loses the messages that it has collected, which come again only after ACK_WAIT_S instead of being given back.
    # All fetches share one inbox, so that the status of an abandoned one ends the next. And status 409, for a queue
    # that is deleted or for too many requests, is raised as a timeout like that of a request that has expired, though
    # it comes at once: a loop around it would be hot.

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.garbage = 0
        """Number of messages that could not be decoded, and were terminated."""
        self._bus = bus
        self._queue = PrefillQueue(bus, subjects)
        ask = f"{api.DEFAULT_PREFIX}.CONSUMER.MSG.NEXT.{subjects.prefill_stream}"
        self._next = {one: f"{ask}.{name}" for one, name in CONSUMERS.items()}
        self._turns = Turns()
        self._inbox, self._doorstep = bus.inbox(), bus.inbox()
        """Where messages come that are there already, and those that are waited for."""
        self._pull_numbers = itertools.count(1)
        self._listens = False
        self._waiting: Subscription | None = None
        """At the doorstep, while jobs are waited for."""
        self._closed = False
        self._arrived: deque[TakenJob] = deque()
        self._pull = _Pull("")
        self._heard = 0
        """Number of messages that arrived, undecodable ones included: each counts for a pull request."""
        self._news = asyncio.Event()
        self._log_once = LogOnce(_log)

    async def take(self, batch: int, timeout_s: float) -> list[TakenJob]:
        """Wait for a job; return all that are there then, at most `batch`. Empty if none came in time or NATS is down.

        Classes of priority take turns (`core.priority.fair_queue.Turns`); jobs of one class come in the order of
        publication. Raises QueueAbsentError if there is no queue, and not before a second has passed (or `timeout_s`,
        if that is less), so that a loop around this call is not hot. One caller at a time. After a cancellation, call
        `close`, or take again.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        await self._listen()
        pauses = _pauses()
        while not await self._look(batch):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or (self._pull.failed and time.monotonic() - began >= _ABSENT_S):
                await self._fail_if_absent()
            if remaining_s <= 0:
                return []
            wait_s = min(remaining_s, _PULL_S)
            pulled_at = time.monotonic()
            if not self._pull.failed:
                await self._wait(wait_s)
            # A pull request that ends early has failed: there is no queue, no server, or too many requests.
            if self._pull.ended is not None and time.monotonic() - pulled_at < wait_s / 2:
                await asyncio.sleep(min(next(pauses), max(0.0, deadline - time.monotonic())))
        return [self._arrived.popleft() for _ in range(min(batch, len(self._arrived)))]

    async def close(self) -> None:
        """Take no more jobs, and give back those that `take` has not returned."""
        # The subscription stays: a pull request that was cancelled is at the server for up to _PULL_S more, and jobs
        # delivered to it must be given back, too.
        self._closed = True
        await self._leave()
        unseen, self._arrived = self._arrived, deque()
        await asyncio.gather(*(job.give_back() for job in unseen))

    async def _listen(self) -> None:
        self._closed = False
        await self._leave()
        if not self._listens:
            self._listens = True
            await self._bus.subscribe(f"{self._inbox}.*", self._on_message)

    async def _look(self, batch: int) -> bool:
        """Pull jobs that are there until `batch` have arrived. Return whether any have."""
        self._drop_stale()
        empty: set[PriorityClass] = set()
        while (missing := batch - len(self._arrived)) > 0:
            chosen = next((one for one in self._turns.order() if one not in empty), None)
            if chosen is None:
                break
            wanted = min(missing, self._turns.row(chosen))
            heard = self._heard
            pull = _Pull(f"{self._inbox}.{next(self._pull_numbers)}")
            await self._pull_jobs(pull, (chosen,), {"batch": wanted, "no_wait": True}, wanted, _GRACE_S)
            if pull.failed:
                break
            if (got := self._heard - heard) > 0:
                self._turns.served(chosen, got)
            if got < wanted:
                self._turns.nobody(chosen)
                empty.add(chosen)
        return bool(self._arrived)

    async def _wait(self, wait_s: float) -> None:
        """Wait until a job of any class arrives."""
        doorstep = f"{self._doorstep}.{next(self._pull_numbers)}"
        try:
            self._waiting = await self._bus.subscribe(doorstep, self._on_message)
        except BusError as error:
            # The connection has ended since the jobs that were there were looked for.
            self._pull = _Pull(doorstep, ended=str(error))
            return
        request = {"batch": 1, "expires": int(wait_s * _NANO)}
        await self._pull_jobs(_Pull(doorstep, len(CONSUMERS)), CONSUMERS, request, 1, wait_s + _GRACE_S)
        await self._leave()

    async def _leave(self) -> None:
        """Wait no more. The server drops pull requests whose answers nobody hears; what it has sent still arrives."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            await waiting.drain()

    async def _pull_jobs(
        self, pull: _Pull, classes: Iterable[PriorityClass], request: Mapping[str, object], wanted: int, within_s: float
    ) -> None:
        """Send pull requests, and wait until `wanted` messages have arrived or the requests have ended."""
        self._pull = pull
        if not self._bus.connected:
            pull.ended = "not connected"
            return
        enough, connections = self._heard + wanted, self._bus.connections
        try:
            for one in classes:
                await self._bus.publish(self._next[one], json.dumps(request).encode(), reply=pull.subject)
            async with asyncio.timeout(within_s):
                while pull.ended is None and self._heard < enough:
                    self._news.clear()
                    await self._wait_for_news()
                    if self._bus.connections != connections:
                        pull.ended = "connected anew"
        except TimeoutError:
            pull.ended = "silence"
        except BusError as error:
            pull.ended = str(error)

    async def _wait_for_news(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._news.wait()

    async def _on_message(self, message: RawMessage) -> None:
        if message.status:
            if message.subject == self._pull.subject:
                self._pull.end(message.status)
        else:
            self._heard += 1
            await self._on_job(message)
        self._news.set()

    async def _on_job(self, message: RawMessage) -> None:
        try:
            job = codec.decode(message.data, PrefillJob)
        except DecodeError as error:
            self.garbage += 1
            _log.warning("a message in the prefill queue is dropped: %s", error)
            await self._bus.publish(message.reply, NEVER)
            return
        taken = TakenJob(self._bus, job, message.reply, time.monotonic())
        if self._closed:
            await taken.give_back()
        else:
            self._arrived.append(taken)

    def _drop_stale(self) -> None:
        """Drop jobs that arrived too long ago; the queue delivers them again."""
        oldest = time.monotonic() - _FRESH_S
        while self._arrived and self._arrived[0].arrived_at < oldest:
            self._arrived.popleft()

    async def _fail_if_absent(self) -> None:
        if not self._pull.failed:
            self._log_once.clear()
            return
        try:
            await self._queue.length()
        except QueueAbsentError:
            raise
        except BusDownError:
            return
        except BusError as error:
            self._log_once.warn(f"no prefill jobs can be taken: {error}")


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
