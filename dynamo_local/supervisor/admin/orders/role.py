"""`dynamo role`: has a running worker take up another role."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.bus.events import publish_event
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.answering import last_answering
from dynamo_local.core.fleet.view import DECODE_ROLE, PREFILL_ROLE, WORKER_ROLES
from dynamo_local.core.messages.admin import RoleAnswer, RoleQuestion
from dynamo_local.core.messages.events import Event
from dynamo_local.core.names import select_watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.connect import ask, bus_of
from dynamo_local.supervisor.admin.status import Row, list_watchers
from state.paths import StatePaths

_ANSWER_WITHIN_S = 10.0

ROLES = (PREFILL_ROLE, DECODE_ROLE)


async def change_role(paths: StatePaths, watcher: str, role: str, *, even_the_last: bool = False) -> RoleAnswer:
    """Ask a worker to take up the role, and return its answer. Raises UsageError as `worker_to_ask`."""
    row = worker_to_ask(await list_watchers(paths), watcher, role, even_the_last=even_the_last)
    assert row.lease is not None, "worker_to_ask raises for a worker without a lease"
    async with bus_of(paths, "role") as bus:
        subject = Subjects(paths.namespace, row.revision).role(row.lease)
        return await ask(bus, row.watcher, subject, RoleQuestion(role), RoleAnswer, timeout_s=_ANSWER_WITHIN_S)


async def change_role_by_hand(paths: StatePaths, watcher: str, role: str, *, even_the_last: bool = False) -> RoleAnswer:
    """Change a role as `change_role` does, and record that by an event."""
    answer = await change_role(paths, watcher, role, even_the_last=even_the_last)
    what = f"switched to {role}" if answer.refused is None else f"not switched to {role}: {answer.refused}"
    async with bus_of(paths, "events") as bus:
        await publish_event(bus, Subjects(paths.namespace), Event("scale", what, "`dynamo role`", watcher))
    return answer


def worker_to_ask(found: Sequence[Row], watcher: str, role: str, *, even_the_last: bool = False) -> Row:
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
