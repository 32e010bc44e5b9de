"""The messages that a frontend sends to workers, each named by its lease."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from components.frontend.requests.live_requests import LiveRequest
from dynamo_local.bus.nats import Bus
from dynamo_local.core.codec import Message
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.work import (
    Ack,
    AskExclusive,
    Cancel,
    CancelReservation,
    EndExclusive,
    MigrationAnswer,
    Progress,
    RequestEpoch,
    Resend,
    Reserve,
    Submit,
    Warm,
)
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


class WorkerLink:
    """Sends the messages of one frontend to workers.

    Only `submit` and `ask_migration_target` raise errors. All other messages are repeated by their senders, or expire
    at the worker: if one of them cannot be sent, that is logged.
    """

    def __init__(self, bus: Bus, subjects: Subjects, frontend: str) -> None:
        """`frontend` is the frontend's own lease."""
        self._bus = bus
        self._subjects = subjects
        self.frontend = frontend

    async def submit(self, worker: str, work: Submit) -> None:
        """Give the worker a request under a new epoch. Raises BusError."""
        await self._bus.send(self._subjects.work(worker), work)

    async def cancel(self, worker: str, request: RequestEpoch) -> None:
        """Have the worker stop this epoch, free its KV blocks and forget its tokens."""
        await self._send(self._subjects.work(worker), worker, Cancel(requests=(request,)))

    async def acknowledge(self, worker: str, progress: tuple[Progress, ...]) -> None:
        """Have the worker forget the tokens below these positions."""
        await self._send(self._subjects.work(worker), worker, Ack(progress=progress))

    async def ask_resend(self, worker: str, progress: tuple[Progress, ...]) -> None:
        """Have the worker send the tokens from these positions on again."""
        await self._send(self._subjects.work(worker), worker, Resend(self.frontend, progress))

    async def ask_exclusive(self, worker: str, request_id: str) -> None:
        """Have the worker take no request but this one."""
        await self._send(self._subjects.work(worker), worker, AskExclusive(request_id, self.frontend))

    async def end_exclusive(self, worker: str, request_id: str) -> None:
        """Have the worker take other requests than this one again."""
        await self._send(self._subjects.work(worker), worker, EndExclusive(request_id, self.frontend))

    async def ask_migration_target(self, worker: str, question: Reserve | Warm, timeout_s: float) -> MigrationAnswer:
        """Ask the worker to reserve room for a request, or to get its KV. Raises BusError, DecodeError."""
        return await self._bus.ask(self._subjects.migrations(worker), question, MigrationAnswer, timeout_s=timeout_s)

    async def cancel_reservation(self, worker: str, request_id: str) -> None:
        """Have the worker give up the room and the KV that it keeps for the request."""
        await self._send(self._subjects.migrations(worker), worker, CancelReservation(request_id))

    async def _send(self, subject: str, worker: str, message: Message) -> None:
        try:
            await self._bus.send(subject, message)
        except BusError as error:
            _log.warning("%s could not be sent to worker %s: %s", type(message).__name__, worker, error)


# Asks workers to send tokens again, after a gap or a silence, and acknowledges the tokens that have arrived.

_ACK_EVERY = 256
"""Tokens of one request between two acknowledgements."""


class Retransmitter:
    """Keeps the tokens of one frontend's requests complete although the bus may lose messages."""

    def __init__(self, link: WorkerLink, tasks: TaskGuard, deadlines: RecoveryDeadlines) -> None:
        self._link = link
        self._tasks = tasks
        self._deadlines = deadlines

    def ask_after_gap(self, live: LiveRequest, now: float) -> None:
        """Tokens arrived that lie beyond the end of the log: ask for those between, unless that was done just now."""
        worker = live.log.worker
        if worker is not None and live.recovery.ask_resend(now, self._deadlines.gap_s):
            self._tasks.spawn(f"resend {live.request_id}", self._link.ask_resend(worker, (live.progress,)))

    async def ask_after_silence(self, requests: Iterable[LiveRequest], now: float) -> None:
        """Ask for those requests of which nothing was heard for too long: each worker once, for all of its own."""
        silent: defaultdict[str, list[LiveRequest]] = defaultdict(list)
        for live in requests:
            if live.log.worker is not None and now - live.recovery.heard_at > self._deadlines.silence_s:
                live.recovery.hear(now)
                silent[live.log.worker].append(live)
        for worker, theirs in silent.items():
            await self._link.ask_resend(worker, tuple(live.progress for live in theirs))

    async def acknowledge(self, worker: str, requests: Sequence[LiveRequest]) -> None:
        """Acknowledge to the worker what has arrived of these requests, once there is enough of it."""
        due = [live for live in requests if live.log.position - live.recovery.acknowledged >= _ACK_EVERY]
        if due:
            await self._link.acknowledge(worker, tuple(live.progress for live in due))
        for live in due:
            live.recovery.acknowledge(live.log.position)
