"""`dynamo requests` and `dynamo migrate`: lists the requests of a running server, and has frontends migrate them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import PREFILL_ROLE, WORKER_ROLES
from dynamo_local.core.messages.admin import (
    MigrationOrder,
    MigrationReport,
    MigrationResult,
    RequestRow,
    RequestsAnswer,
    RequestsQuestion,
)
from dynamo_local.core.names import Subjects
from dynamo_local.supervisor.admin.connect import bus_of
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
    """A request under way. Workers are named by their watchers. `stays`: why the request cannot be migrated."""

    request: str
    worker: str | None
    epoch: int
    prompt_tokens: int
    tokens: int
    age_s: float
    moving_to: str | None
    stays: str | None
    frontend: str


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
        question = codec.encode(RequestsQuestion(limit))
        answer = await self.bus.request(self.subjects.requests(lease), question, timeout_s=_ANSWER_WITHIN_S)
        return codec.decode(answer, RequestsAnswer)

    async def migrate(self, lease: str, order: MigrationOrder) -> tuple[MigrationResult, ...]:
        """Have a frontend migrate requests of its own. Raises BusError, DecodeError."""
        subject = self.subjects.requests(lease)
        answer = await self.bus.request(subject, codec.encode(order), timeout_s=_MIGRATED_WITHIN_S)
        return codec.decode(answer, MigrationReport).results


async def list_requests(paths: StatePaths, limit: int) -> RequestsView:
    """List the `limit` oldest requests of each frontend. Raises NotRunningError, BusError."""
    found = await list_watchers(paths)
    async with bus_of(paths, "requests") as bus:
        server = _Server(bus, Subjects(paths.namespace), found)
        answers = [(watcher, await server.requests(lease, limit)) for watcher, lease in server.frontends]
    lines = tuple(_line(row, watcher, server.names) for watcher, answer in answers for row in answer.requests)
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
    """The lease of a worker. `ready`: it must be ready to take requests. Pure. Raises UsageError."""
    workers = [row for row in found if row.role in WORKER_ROLES or (not ready and row.role == PREFILL_ROLE)]
    row = next((row for row in workers if row.watcher == watcher), None)
    if row is None:
        prefills = any(row.watcher == watcher and row.role == PREFILL_ROLE for row in found)
        cause = f"{watcher} prefills, and decodes nothing" if prefills else f"there is no worker {watcher!r}"
        raise UsageError(cause, f"there are {', '.join(row.watcher for row in workers) or 'none'}")
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
        moving_to=_named(row.moving_to, names),
        stays=row.stays,
        frontend=frontend,
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
