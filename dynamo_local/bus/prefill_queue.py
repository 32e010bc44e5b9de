"""The prefill queue: jobs that frontends publish and prefill workers take (bus/prefill_consumer.py).

A work-queue stream of JetStream on disk: a job is kept until its taker says that it is done, whoever dies meanwhile.
It is created by its owner, `dynamo serve`, and by nobody else: a reader that created it would read a plausible zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dynamo_local.bus.jetstream import JetStream, QueueLimits, StreamAbsentError, StreamFullError
from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.errors import DecodeError, QueueAbsentError, QueueFullError
from dynamo_local.core.messages.prefill import PrefillJob
from dynamo_local.core.names import Subjects

ACK_WAIT_S = 5.0
"""A job in hand that its taker has not kept alive for so long is delivered again."""
KEEP_ALIVE_S = ACK_WAIT_S / 4
"""How often a taker keeps a job alive."""
CONSUMER = "workers"
"""The one durable consumer, which all prefill workers pull from."""

LIMITS = QueueLimits(
    # Far beyond any sensible max-prefill-queue-size: what is left of jobs whose frontends died must fit as well.
    messages=10_000,
    # Ids may come from clients, in a header.
    message_bytes=64 * 1024,
    # Jobs have deadlines of seconds to minutes, which their takers see to. This is for jobs that nobody takes.
    age_s=3600.0,
    ack_wait_s=ACK_WAIT_S,
)
_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class QueueLength:
    """Jobs not yet delivered, and jobs delivered that are not ended: with a worker, or waiting to be delivered
    again."""

    waiting: int
    in_hand: int


@dataclass(frozen=True)
class QueuedJob:
    """A job as it lies in the queue. `job` is None if it cannot be understood. `taken`: it was delivered, once or more
    often."""

    sequence: int
    job: PrefillJob | None
    age_s: float
    taken: bool


class PrefillQueue:
    """The queue of one namespace, for all but its takers. Keeps no state.

    Every call raises QueueAbsentError when there is no queue, BusError when NATS does not answer in time.
    """

    def __init__(self, bus: Bus, subjects: Subjects, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._stream = JetStream(bus, timeout_s=timeout_s)
        self._name = subjects.prefill_stream
        self._subject = subjects.prefill_jobs
        self._namespace = subjects.namespace

    async def publish(self, job: PrefillJob) -> None:
        """Queue a job. Raises QueueFullError. After another BusError the job may be queued nevertheless: be ready to
        refuse whoever claims it."""
        with self._errors():
            await self._stream.append(self._name, self._subject, codec.encode(job))

    async def length(self) -> QueueLength:
        """How many jobs there are."""
        with self._errors():
            state = await self._stream.state(self._name, CONSUMER)
        return QueueLength(state.waiting, state.in_hand)

    async def jobs(self, limit: int) -> list[QueuedJob]:
        """The oldest jobs, left where they are."""
        found: list[QueuedJob] = []
        with self._errors():
            state = await self._stream.state(self._name, CONSUMER)
            sequence = 1
            while len(found) < limit:
                message = await self._stream.next_message(self._name, self._subject, sequence)
                if message is None:
                    break
                taken = message.sequence <= state.delivered
                found.append(QueuedJob(message.sequence, _understood(message.data), message.age_s, taken))
                sequence = message.sequence + 1
        return found

    async def purge(self) -> int:
        """Drop all jobs, those in hand as well: who has one finishes it. Returns how many."""
        with self._errors():
            return await self._stream.purge(self._name)

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
    """For the owner alone: a new, empty queue. What an earlier owner has left goes, jobs included. Raises BusError."""
    stream = JetStream(bus, timeout_s=_TIMEOUT_S)
    await stream.create_queue(subjects.prefill_stream, subjects.prefill_jobs, CONSUMER, limits)


async def delete_prefill_queue(bus: Bus, subjects: Subjects) -> bool:
    """For the owner alone. False if there was none. Raises BusError."""
    return await JetStream(bus, timeout_s=_TIMEOUT_S).delete(subjects.prefill_stream)


def _understood(data: bytes) -> PrefillJob | None:
    try:
        return codec.decode(data, PrefillJob)
    except DecodeError:
        return None
