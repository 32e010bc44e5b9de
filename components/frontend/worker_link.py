"""The messages that a frontend sends to workers, each named by its lease."""

from __future__ import annotations

import logging

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.migration import CancelReservation, MigrationAnswer, Reserve, Warm
from dynamo_local.core.messages.work import (
    Ack,
    AskExclusive,
    Cancel,
    EndExclusive,
    Progress,
    RequestEpoch,
    Resend,
    Submit,
)
from dynamo_local.core.subjects import Subjects

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

    async def _send(self, subject: str, worker: str, message: msgspec.Struct) -> None:
        try:
            await self._bus.send(subject, message)
        except BusError as error:
            _log.warning("%s could not be sent to worker %s: %s", type(message).__name__, worker, error)
