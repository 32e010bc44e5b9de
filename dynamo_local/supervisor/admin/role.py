"""Has a running worker take up another role."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from dynamo_local.control.answers import WatcherRow
from dynamo_local.core.errors import StateError, UsageError
from dynamo_local.core.fleet.view import DECODE_ROLE, PREFILL_ROLE, WORKER_ROLES, last_answering
from dynamo_local.core.messages.admin import RoleAnswer, RoleQuestion
from dynamo_local.core.messages.events import Event
from dynamo_local.core.names import select_watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.connect import ask
from dynamo_local.supervisor.admin.status import list_watchers
from dynamo_local.tasks import finish_in_thread
from state.statefile.transitions import set_role

_ANSWER_WITHIN_S = 10.0

ROLES = (PREFILL_ROLE, DECODE_ROLE)


class RoleWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The role that a worker is to take up. `force`: even if no worker is left that decodes. `recorded`: an event is to
    record it."""

    role: str
    force: bool = False
    recorded: bool = True


async def change_role(server: AskedServer, watcher: str, wish: RoleWish) -> str:
    """Have a worker take up the role, and return its role. Raises UsageError as `worker_to_ask`, and if the worker
    refuses; SupervisorError, BusError, StateError."""
    bus = await server.bus()
    async with server.role_change:
        row = worker_to_ask(await list_watchers(server), watcher, wish.role, even_the_last=wish.force)
        assert row.lease is not None, "worker_to_ask raises for a worker without a lease"
        subject = Subjects(server.paths.namespace, row.revision).role(row.lease)
        answer = await ask(bus, row.watcher, subject, RoleQuestion(wish.role), RoleAnswer, timeout_s=_ANSWER_WITHIN_S)
    if wish.recorded:
        done = f"switched to {wish.role}"
        what = done if answer.refused is None else f"not {done}: {answer.refused}"
        server.record(Event("scale", what, "`dynamo role`", watcher))
    if answer.refused is not None:
        raise UsageError(f"{watcher} stays in the role {answer.role}: {answer.refused}")
    # The process that follows this one keeps the role, from the answer on. If it cannot be written now, it is soon: the
    # worker announces it.
    lease = row.lease
    with suppress(StateError):
        await finish_in_thread(lambda: server.store.update(lambda s: set_role(s, row.watcher, lease, answer.role)))
    return answer.role


def worker_to_ask(found: Sequence[WatcherRow], watcher: str, role: str, *, even_the_last: bool = False) -> WatcherRow:
    """The worker that is to take up the role; it has a lease. Pure.

    Raises UsageError for what is no ready worker and, unless `even_the_last`, for the last worker of its model that
    answers requests if it is to prefill.
    """
    workers = {row.watcher: row for row in found if row.role in ROLES}
    if not workers:
        raise UsageError("this graph has no prefill workers, and so no roles to choose from", "serve a graph that has")
    row = workers[select_watcher(watcher, workers)]
    if row.state != "ready" or row.lease is None:
        raise UsageError(f"{watcher} is not ready but {row.state}", "wait until `dynamo ps` shows it ready")
    peers = [other for other in workers.values() if other.revision == row.revision]
    ready = {other.watcher: other.role for other in peers if other.state == "ready"}
    if role not in WORKER_ROLES and not even_the_last and last_answering(ready, {row.watcher}):
        raise UsageError(f"{watcher} is the only one that decodes", "start another one first, or use --force")
    return row
