"""`dynamo role`: have a running worker take up another role."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.admin import RoleAnswer, RoleQuestion
from dynamo_local.core.names import Subjects
from dynamo_local.supervisor.admin.status import Row, rows
from state.paths import StatePaths

_CONNECT_WITHIN_S = 2.0
_ANSWER_WITHIN_S = 10.0

DECODE_ROLE = "decode"
ROLES = (PREFILL_ROLE, DECODE_ROLE)


async def change_role(paths: StatePaths, watcher: str, role: str, *, even_the_last: bool = False) -> RoleAnswer:
    """Ask the watcher's process, and return what it says. Raises UsageError for what cannot be asked."""
    lease = lease_to_ask(await rows(paths), watcher, role, even_the_last=even_the_last)
    address = await asyncio.to_thread(BusAddress.load, paths.bus_file)
    bus = await Bus.connect(address, name="role", deadline_s=_CONNECT_WITHIN_S)
    try:
        subject = Subjects(paths.namespace).role(lease)
        return await bus.ask(subject, RoleQuestion(role), RoleAnswer, timeout_s=_ANSWER_WITHIN_S)
    finally:
        await bus.close()


def lease_to_ask(found: Sequence[Row], watcher: str, role: str, *, even_the_last: bool = False) -> str:
    """The lease of the worker that is to take up the role.

    The last ready worker that decodes is not turned unless `even_the_last`: without one, no request is answered.
    """
    workers = [row for row in found if row.role in ROLES]
    if not workers:
        raise UsageError("this graph has no prefill workers, and so no roles to choose from", "serve a graph that has")
    row = next((row for row in workers if row.watcher == watcher), None)
    if row is None:
        raise UsageError(f"there is no worker {watcher!r}", f"there are {', '.join(row.watcher for row in workers)}")
    if row.state != "ready" or row.lease is None:
        raise UsageError(f"{watcher} is not ready but {row.state}", "wait until `dynamo ps` shows it ready")
    decoding = [other for other in workers if other.role == DECODE_ROLE and other.state == "ready"]
    if decoding == [row] and role != DECODE_ROLE and not even_the_last:
        raise UsageError(f"{watcher} is the only one that decodes", "start another one first, or use --force")
    return row.lease
