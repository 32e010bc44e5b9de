"""`dynamo requests` and `dynamo migrate`: lists the requests of a running server, and has frontends migrate them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES, PREFILL_ROLE, WORKER_ROLES
from dynamo_local.core.messages.admin import (
    MigrationOrder,
    MigrationReport,
    MigrationResult,
    RequestRow,
    RequestsAnswer,
    RequestsQuestion,
)
from dynamo_local.core.names import Subjects, select_watcher, short_watcher
from dynamo_local.supervisor.admin.connect import ask, bus_of
from dynamo_local.supervisor.admin.status import Row, list_watchers
from state.paths import StatePaths

_ANSWER_WITHIN_S = 5.0
_MIGRATED_WITHIN_S = 120.0
_ALL = 2**31

FRONTEND_ROLE = "frontend"

_ID = re.compile(r"(?:\d+_)?(?P<told>cmpl-.*(?=-\d+-)|(?!cmpl-).*)(?:-\d+)?-[0-9a-f]{8}")
"""A request id as vLLM's OpenAI server makes it. `told` is the part that the client knows; each choice and each prompt
of a client's request has an id of its own."""


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request under way. Workers are named by their watchers. `stays`: why the request cannot be migrated. The last
    fields are those of RequestRow (core/messages/admin.py)."""

    request: str
    worker: str | None
    epoch: int
    prompt_tokens: int
    tokens: int
    age_s: float
    moving_to: str | None
    stays: str | None
    frontend: str
    epoch_age_s: float | None = None
    epoch_start: int = 0
    migrations: int = 0
    prefill: str | None = None
    fidelity: str = "exact"
    fidelity_because_of: str | None = None


class RequestsView(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest requests of each frontend, and the number of those that are left out."""

    requests: tuple[RequestLine, ...]
    left_out: int


class MigrationLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one request's migration. `outcome`: see core/migration/protocol.py. `warm_s`: from the start of the
    migration to the cut-over. `gap_s`: from the last token before the cut-over to the first one after it; `gap_steps`:
    the same in engine steps."""

    request: str
    outcome: str
    why: str
    worker: str | None
    """The destination; None if there was none."""
    warm_s: float | None
    gap_s: float | None
    gap_steps: float | None


@dataclass(frozen=True)
class _Server:
    """The bus of a running server, and its watchers."""

    bus: Bus
    subjects: Subjects
    rows: Sequence[Row]

    @property
    def frontends(self) -> list[tuple[str, str]]:
        """Watcher and lease of each frontend."""
        return [(row.watcher, row.lease) for row in self.rows if row.role == FRONTEND_ROLE and row.lease is not None]

    @property
    def names(self) -> Mapping[str, str]:
        """Watchers by lease."""
        return {row.lease: row.watcher for row in self.rows if row.lease is not None}

    async def requests(self, lease: str, limit: int) -> RequestsAnswer:
        """Ask a frontend for its oldest requests. Raises BusError, DecodeError."""
        subject, question = self.subjects.requests(lease), RequestsQuestion(limit)
        return await ask(self.bus, self.names[lease], subject, question, RequestsAnswer, timeout_s=_ANSWER_WITHIN_S)

    async def migrate(self, lease: str, order: MigrationOrder) -> tuple[MigrationResult, ...]:
        """Have a frontend migrate requests of its own. Raises BusError, DecodeError."""
        subject = self.subjects.requests(lease)
        report = await ask(self.bus, self.names[lease], subject, order, MigrationReport, timeout_s=_MIGRATED_WITHIN_S)
        return report.results


async def list_requests(paths: StatePaths, limit: int, worker: str | None = None) -> RequestsView:
    """List the `limit` oldest requests of each frontend, or of one worker among them.

    Raises UsageError for what is no worker, NotRunningError, BusError.
    """
    found = await list_watchers(paths)
    workers = [row.watcher for row in found if row.role in ENGINE_ROLES]
    only = None if worker is None else select_watcher(worker, workers)
    async with bus_of(paths, "requests") as bus:
        server = _Server(bus, Subjects(paths.namespace), found)
        wanted = limit if only is None else _ALL
        answers = [(watcher, await server.requests(lease, wanted)) for watcher, lease in server.frontends]
    lines = tuple(_line(row, watcher, server.names) for watcher, answer in answers for row in answer.requests)
    if only is not None:
        mine = tuple(line for line in lines if line.worker == only)
        return RequestsView(requests=mine[:limit], left_out=len(mine[limit:]))
    return RequestsView(requests=lines, left_out=sum(answer.left_out for _, answer in answers))


async def migrate(
    paths: StatePaths,
    *,
    request: str | None = None,
    source: str | None = None,
    destination: str | None = None,
    cold: bool = False,
) -> list[MigrationLine]:
    """Migrate one request, or all requests of the worker `source`.

    `request`: the id that its client knows, or the beginning of it. `source`, `destination`: watchers' names. `cold`:
    without KV, which the destination then computes. Raises UsageError for what cannot be asked, NotRunningError,
    BusError.
    """
    found = await list_watchers(paths)
    to = None if destination is None else lease_of(found, destination, ready=True)
    of = None if source is None else lease_of(found, source, ready=False)
    async with bus_of(paths, "migrate") as bus:
        server = _Server(bus, Subjects(paths.namespace), found)
        orders = {lease: MigrationOrder((), of, to, cold) for _, lease in server.frontends}
        if request is not None:
            owned = {lease: (await server.requests(lease, _ALL)).requests for _, lease in server.frontends}
            orders = {lease: MigrationOrder(ids, None, to, cold) for lease, ids in meant_by(request, owned).items()}
        results = await asyncio.gather(*(server.migrate(lease, order) for lease, order in orders.items()))
    return [_migration_line(result, server.names) for each in results for result in each]


def lease_of(found: Sequence[Row], watcher: str, *, ready: bool) -> str:
    """The lease of a worker, named as `select_watcher` takes it. `ready`: it must be ready to take requests. Pure.
    Raises UsageError."""
    workers = {row.watcher: row for row in found if row.role in ENGINE_ROLES}
    row = workers[select_watcher(watcher, workers)]
    if ready and row.role == PREFILL_ROLE:
        others = [short_watcher(name) for name, other in workers.items() if other.role in WORKER_ROLES]
        raise UsageError(f"{watcher} prefills, and decodes nothing", f"there are: {', '.join(others) or 'none'}")
    if row.lease is None or (ready and row.state != "ready"):
        raise UsageError(f"{watcher} is not ready but {row.state}", "wait until `dynamo ps` shows it ready")
    return row.lease


def meant_by(request: str, owned: Mapping[str, Sequence[RequestRow]]) -> dict[str, tuple[str, ...]]:
    """Select requests by the id that a client knows, or its beginning. Pure.

    `owned`: the requests of each frontend, by its lease. Returns the ids of those selected, by lease. Raises UsageError
    if there is none, or if they belong to several clients' requests.
    """
    if not request:
        raise UsageError("no request is named", "`dynamo requests` shows those there are")
    meant = {
        lease: tuple(row.request_id for row in rows if told_id(row.request_id).startswith(request))
        for lease, rows in owned.items()
    }
    told = sorted({told_id(request_id) for ids in meant.values() for request_id in ids})
    if not told:
        raise UsageError(f"there is no request {request!r}", "`dynamo requests` shows those there are")
    if len(told) > 1:
        raise UsageError(f"{request!r} means {len(told)} requests", f"it may be {told[0]} or {told[1]}")
    return {lease: ids for lease, ids in meant.items() if ids}


def told_id(request_id: str) -> str:
    """The part of a request id that the client knows."""
    match = _ID.fullmatch(request_id)
    return request_id if match is None else match["told"]


def _line(row: RequestRow, frontend: str, names: Mapping[str, str]) -> RequestLine:
    return RequestLine(
        request=told_id(row.request_id),
        worker=_named(row.worker, names),
        epoch=row.epoch,
        prompt_tokens=row.prompt_tokens,
        tokens=row.tokens,
        age_s=round(row.age_s, 3),
        moving_to=_named(row.destination, names),
        stays=row.stays,
        frontend=frontend,
        epoch_age_s=row.epoch_age_s,
        epoch_start=row.epoch_start,
        migrations=row.migrations,
        prefill=row.prefill,
        fidelity=row.fidelity,
        fidelity_because_of=row.fidelity_because_of,
    )


def _migration_line(result: MigrationResult, names: Mapping[str, str]) -> MigrationLine:
    return MigrationLine(
        request=told_id(result.request_id),
        outcome=result.outcome,
        why=result.why,
        worker=_named(result.destination, names),
        warm_s=result.warm_s,
        gap_s=result.gap_s,
        gap_steps=result.gap_steps,
    )


def _named(lease: str | None, names: Mapping[str, str]) -> str | None:
    return None if lease is None else names.get(lease, lease)
