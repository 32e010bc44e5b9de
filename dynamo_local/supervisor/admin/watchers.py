"""The watchers of a server: the state of each, by the statefile, circusd, and the processes' own presences on the bus;
and how a worker takes up another role."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from dynamo_local.control.answers import WatcherRow
from dynamo_local.core.errors import NotRunningError, StateError, SupervisorError, UsageError
from dynamo_local.core.fleet.view import DECODE_ROLE, PREFILL_ROLE, WORKER_ROLES, last_answering
from dynamo_local.core.messages.admin import RoleAnswer, RoleQuestion
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import (
    BUS_SERVICE,
    FORKSERVER_SERVICE,
    LOCAL_NODE,
    endpoint_of,
    parse_revision,
    select_watcher,
)
from dynamo_local.core.routing.pulling import ways_of_kv
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.asked import NO_ANSWER, AskedServer, ask
from dynamo_local.supervisor.circus.client import ACTIVE
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.supervisor.server.reports.progress import described
from dynamo_local.supervisor.upkeep.devices import held_by_others
from dynamo_local.tasks import finish_in_thread
from state.devices.allocation import holder_lines
from state.statefile.model import Component
from state.statefile.transitions import set_role

_ANSWER_WITHIN_S = 10.0
ROLES = (PREFILL_ROLE, DECODE_ROLE)


async def list_watchers(server: AskedServer) -> list[WatcherRow]:
    """List all watchers, as `in_order`. Raises SupervisorError, StateError."""
    state, (statuses, pids), (present, away) = await asyncio.gather(
        server.state(), server.processes(), server.presences()
    )
    rows = [
        row(component, statuses.get(name), pids.get(name, ()), present.get(name), away)
        if component.node == state.node
        else row_of_node(component, present.get(name), away)
        for name, component in state.components.items()
    ]
    ways = ways_of_kv(present.values())
    return in_order(msgspec.structs.replace(each, kv=ways.get(each.watcher)) for each in rows)


async def devices_of_others(server: AskedServer) -> list[str]:
    """Describe the devices of this machine that others hold, in a line each. Empty while the server starts or ends."""

    def read() -> list[str]:
        blueprint = Blueprint.read(server.paths)
        return holder_lines(blueprint.inventory.kind, held_by_others(blueprint, server.store.read()))

    try:
        return await asyncio.to_thread(read)
    except (SupervisorError, StateError, NotRunningError):
        return []


def in_order(rows: Iterable[WatcherRow]) -> list[WatcherRow]:
    """List the graph's watchers, then those of each endpoint. An endpoint's watcher without a process is left out: the
    endpoint's own state says that it is asleep, or has failed."""
    return sorted((row for row in rows if row.is_of_graph or row.state != "stopped"), key=_by_endpoint)


def _by_endpoint(row: WatcherRow) -> tuple[str, int]:
    return ("", 0) if row.is_of_graph else (row.endpoint, parse_revision(row.revision).number)


def row(
    component: Component,
    status: str | None,
    pids: tuple[int, ...],
    presence: Presence | None,
    away: str,
) -> WatcherRow:
    """Put together what is known of one watcher. `status` and `pids` are circus's; `away`: why nothing is heard on the
    bus; empty where it answers."""
    # The statefile has a forked process's own pid; circus knows its launcher's only.
    pid = component.pid or pids[0] if pids else None
    return _row(component, pid, presence, *_health(component, status, pid, presence, away))


def row_of_node(component: Component, presence: Presence | None, away: str) -> WatcherRow:
    """The same of a watcher on another node, whose circusd is not asked."""
    pid = None if presence is None else presence.pid
    return _row(component, pid, presence, *_health(component, ACTIVE, pid, presence, away))


def _row(component: Component, pid: int | None, presence: Presence | None, health: str, detail: str) -> WatcherRow:
    revision, engine = component.revision, presence.engine if presence is not None else None
    return WatcherRow(
        watcher=component.watcher_name,
        component=component.component,
        role=component.role,
        endpoint=endpoint_of(revision),
        revision=revision,
        pid=pid,
        devices=component.devices,
        share=component.resources.share,
        state=health,
        detail=detail,
        lease=component.lease,
        url=presence.url if presence is not None else None,
        load=presence.load if presence is not None else None,
        no_transfer=engine.no_transfer if engine is not None else None,
        node=component.node,
    )


def _health(
    component: Component, status: str | None, pid: int | None, presence: Presence | None, away: str
) -> tuple[str, str]:
    if not component.holds:
        return "stopped", ""
    if component.phase is not None:
        return component.phase, _described(presence, pid)
    if component.node != LOCAL_NODE and pid is None:
        return ("unknown", away) if away else ("silent", "its node may not answer")
    if status != ACTIVE or pid is None:
        return "ended", "to be started again" if status is not None else "to be started"
    if component.component == BUS_SERVICE:
        return ("failed", "does not answer") if away == NO_ANSWER else ("ready", "")
    if component.component == FORKSERVER_SERVICE:
        return "ready", ""
    if presence is not None and presence.pid == pid:
        return presence.state, presence.detail
    return ("unknown", away) if away else ("silent", "")


def _described(presence: Presence | None, pid: int | None) -> str:
    """The last presence of a process, in words, for a watcher whose state is told by the change under way."""
    if pid is None:
        return "no process"
    return described(presence) if presence is not None and presence.pid == pid else ""


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
