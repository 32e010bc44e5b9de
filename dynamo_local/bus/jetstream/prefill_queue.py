"""The prefill queue: jobs that frontends publish and prefill workers take (bus/jetstream/prefill_consumer.py).

The queue is a work-queue stream of JetStream on disk: a job is kept until a worker acknowledges that it is done,
whichever process dies meanwhile. Each priority class has a subject and a consumer of its own in it. Only the queue's
owner, `dynamo serve`, creates it: a reader that created a missing queue would report a plausible length of zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from dynamo_local.bus.jetstream.streams import ConsumerState, JetStream, QueueLimits, StreamAbsentError, StreamFullError
from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.errors import DecodeError, QueueAbsentError, QueueFullError
from dynamo_local.core.messages.prefill import PrefillJob, QueueLength
from dynamo_local.core.priority.classes import PriorityClass, class_of
from dynamo_local.core.subjects import Subjects

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

    def __init__(self, bus: Bus, subjects: Subjects, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._stream = JetStream(bus, timeout_s=timeout_s)
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
