"""The requests of a running server, by its frontends: which there are, and how they are migrated.

A frontend answers once for each revision that it serves, on the subjects of that revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.control.answers import RequestsView, WatcherRow
from dynamo_local.core.errors import BusError, NobodyListensError, UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES, FRONTEND_ROLE, PREFILL_ROLE, WORKER_ROLES
from dynamo_local.core.messages.admin import (
    HeldRow,
    MigrationOrder,
    MigrationReport,
    MigrationResult,
    RequestLine,
    RequestsAnswer,
    RequestsQuestion,
)
from dynamo_local.core.names import endpoint_of, select_watcher, short_watcher
from dynamo_local.core.request.log import told_id
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.asked import AskedServer, ask, known_revisions, shown_model, unanswered
from dynamo_local.supervisor.admin.watchers import list_watchers

_K = TypeVar("_K")

_ALL = 2**31
_ANSWER_WITHIN_S = 5.0
_MIGRATED_WITHIN_S = 120.0


@dataclass(frozen=True)
class Scope:
    """The requests of one frontend, by its lease, for one revision."""

    frontend: str
    revision: str


@dataclass(frozen=True)
class AskedFrontends:
    """The frontends of a running server: its bus, its watchers, and the revisions whose requests are meant."""

    bus: Bus
    namespace: str
    rows: Sequence[WatcherRow]
    revisions: Sequence[str]

    @property
    def frontends(self) -> dict[str, WatcherRow]:
        """The frontends, by lease."""
        return {row.lease: row for row in self.rows if row.role == FRONTEND_ROLE and row.lease is not None}

    @property
    def names(self) -> Mapping[str, str]:
        """Watchers by lease."""
        return {row.lease: row.watcher for row in self.rows if row.lease is not None}

    async def requests(self, limit: int) -> dict[Scope, RequestsAnswer]:
        """Ask each frontend for its oldest requests of each revision; one that does not serve a revision has none.

        Raises BusError, DecodeError.
        """
        found: dict[Scope, RequestsAnswer] = {}
        for lease, row in self.frontends.items():
            scopes = [Scope(lease, revision) for revision in self.revisions]
            answers = await asyncio.gather(*(self._requests(scope, limit) for scope in scopes))
            answered = {scope: answer for scope, answer in zip(scopes, answers, strict=True) if answer is not None}
            if not answered and row.state != "ready":
                raise unanswered(row.watcher)
            found |= answered
        return found

    async def _requests(self, scope: Scope, limit: int) -> RequestsAnswer | None:
        try:
            return await self.bus.ask(
                self._subject(scope), RequestsQuestion(limit), RequestsAnswer, timeout_s=_ANSWER_WITHIN_S
            )
        except NobodyListensError:
            return None
        except BusError as error:
            raise unanswered(self.names[scope.frontend]) from error

    def _subject(self, scope: Scope) -> str:
        return Subjects(self.namespace, scope.revision).requests(scope.frontend)

    async def migrate(self, scope: Scope, order: MigrationOrder) -> tuple[MigrationResult, ...]:
        """Have a frontend migrate requests of its own. Raises BusError, DecodeError."""
        lease, subject = scope.frontend, self._subject(scope)
        report = await ask(self.bus, self.names[lease], subject, order, MigrationReport, timeout_s=_MIGRATED_WITHIN_S)
        return report.results


async def look(server: AskedServer, endpoint: str | None = None) -> tuple[list[WatcherRow], list[str]]:
    """The watchers of a server, and the revisions whose requests frontends may have: all, or those of an endpoint."""
    found, board = await asyncio.gather(list_watchers(server), server.board())
    return found, known_revisions((row.revision for row in found), board, endpoint)


async def list_requests(
    server: AskedServer, limit: int, worker: str | None = None, endpoint: str | None = None
) -> RequestsView:
    """List the `limit` oldest requests of each frontend, or of one worker or one endpoint among them.

    Raises UsageError for what is no worker or no endpoint, SupervisorError, BusError.
    """
    bus = await server.bus()
    found, revisions = await look(server, endpoint)
    only = None if worker is None else worker_of(found, worker, ready=False, lease=False)
    if only is not None:
        revisions = [revision for revision in revisions if revision == only.revision]
    asked = AskedFrontends(bus, server.paths.namespace, found, revisions)
    answers = await asked.requests(limit if only is None else _ALL)
    views = (_of_frontend(lease, asked.names, answers, only, limit) for lease in asked.frontends)
    lines, left_out = zip(*views, strict=True) if asked.frontends else ((), ())
    return RequestsView(requests=tuple(chain.from_iterable(lines)), left_out=sum(left_out))


def _of_frontend(
    lease: str, names: Mapping[str, str], answers: Mapping[Scope, RequestsAnswer], only: WatcherRow | None, limit: int
) -> tuple[list[RequestLine], int]:
    """The `limit` oldest requests of one frontend, and how many there are beside them."""
    mine = {scope.revision: answer for scope, answer in answers.items() if scope.frontend == lease}
    lines = [_line(row, lease, revision, names) for revision, answer in mine.items() for row in answer.requests]
    lines += [_held_line(row, names[lease], revision) for revision, answer in mine.items() for row in answer.held]
    wanted = sorted(
        (line for line in lines if only is None or line.worker == only.watcher), key=lambda line: -line.age_s
    )
    beyond = 0 if only is not None else sum(answer.left_out for answer in mine.values())
    return wanted[:limit], len(wanted[limit:]) + beyond


class MigrationWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order to migrate one request, or all requests of the worker `source`.

    `request`: the id that its client knows, or the beginning of it. `source`, `to`: watchers' names. `cold`: without
    KV, which the destination then computes.
    """

    request: str | None = None
    source: str | None = msgspec.field(default=None, name="from")
    to: str | None = None
    cold: bool = False


async def migrate(server: AskedServer, wish: MigrationWish) -> list[MigrationResult]:
    """Migrate what is wished. Raises UsageError for what cannot be asked, such as a destination of another revision,
    SupervisorError, BusError."""
    if (wish.request is None) == (wish.source is None):
        raise UsageError("name either a request or a worker to migrate from")
    bus = await server.bus()
    found, revisions = await look(server)
    to = None if wish.to is None else worker_of(found, wish.to, ready=True)
    of = None if wish.source is None else worker_of(found, wish.source, ready=False)
    lease_to = None if to is None else to.lease
    asked = AskedFrontends(bus, server.paths.namespace, found, revisions)
    orders: dict[Scope, MigrationOrder] = {}
    if of is not None:
        order = MigrationOrder((), of.lease, lease_to, wish.cold)
        orders = {Scope(lease, of.revision): order for lease in asked.frontends}
    if wish.request is not None:
        owned = {scope: answer.requests for scope, answer in (await asked.requests(_ALL)).items()}
        meant = meant_by(wish.request, owned)
        orders = {scope: MigrationOrder(ids, None, lease_to, wish.cold) for scope, ids in meant.items()}
    check_destination(to, {scope.revision for scope in orders})
    results = await asyncio.gather(*(asked.migrate(scope, order) for scope, order in orders.items()))
    return [
        msgspec.structs.replace(each, request=told_id(each.request), worker=_named(each.worker, asked.names))
        for each in chain.from_iterable(results)
    ]


def check_destination(to: WatcherRow | None, revisions: Collection[str]) -> None:
    """Raise UsageError if requests of these revisions cannot migrate to this worker, which serves another one. Pure."""
    others = sorted(revision for revision in revisions if to is not None and revision != to.revision)
    if to is not None and others:
        raise UsageError(
            f"{short_watcher(to.watcher)} serves {shown_model(to.revision)}, not {shown_model(others[0])}",
            "a request migrates between workers of one revision only",
        )


def worker_of(found: Sequence[WatcherRow], watcher: str, *, ready: bool, lease: bool = True) -> WatcherRow:
    """The worker of this name, as `select_watcher` takes it. `ready`: it must be ready to take requests; `lease`: it
    must have a process. Pure. Raises UsageError."""
    workers = {row.watcher: row for row in found if row.role in ENGINE_ROLES}
    row = workers[select_watcher(watcher, workers)]
    if ready and row.role == PREFILL_ROLE:
        others = [short_watcher(name) for name, other in workers.items() if other.role in WORKER_ROLES]
        raise UsageError(f"{watcher} prefills, and decodes nothing", f"there are: {', '.join(others) or 'none'}")
    if (lease and row.lease is None) or (ready and row.state != "ready"):
        raise UsageError(f"{watcher} is not ready but {row.state}", "wait until `dynamo ps` shows it ready")
    return row


def meant_by(request: str, owned: Mapping[_K, Sequence[RequestLine]]) -> dict[_K, tuple[str, ...]]:
    """Select requests by the id that a client knows, or its beginning. Pure.

    `owned`: the requests by owner, a frontend and a revision. Returns the ids of those selected, by owner. Raises
    UsageError if there is none, or if they belong to several clients' requests.
    """
    if not request:
        raise UsageError("no request is named", "`dynamo requests` shows those there are")
    meant = {
        owner: tuple(row.request for row in rows if told_id(row.request).startswith(request))
        for owner, rows in owned.items()
    }
    told = sorted({told_id(request_id) for ids in meant.values() for request_id in ids})
    if not told:
        raise UsageError(f"there is no request {request!r}", "`dynamo requests` shows those there are")
    if len(told) > 1:
        raise UsageError(f"{request!r} means {len(told)} requests", f"it may be {told[0]} or {told[1]}")
    return {owner: ids for owner, ids in meant.items() if ids}


def _line(row: RequestLine, frontend: str, revision: str, names: Mapping[str, str]) -> RequestLine:
    """As a frontend tells it, with the names of operators."""
    return msgspec.structs.replace(
        row,
        request=told_id(row.request),
        worker=_named(row.worker, names),
        endpoint=endpoint_of(revision),
        revision=revision,
        age_s=round(row.age_s, 3),
        moving_to=_named(row.moving_to, names),
        frontend=names[frontend],
    )


def _held_line(row: HeldRow, frontend: str, revision: str) -> RequestLine:
    return RequestLine(
        request="-",
        worker=None,
        endpoint=endpoint_of(revision),
        revision=revision,
        epoch=0,
        prompt_tokens=None,
        tokens=0,
        age_s=round(row.age_s, 3),
        stays="it is held",
        frontend=frontend,
        held=row.why,
    )


def _named(lease: str | None, names: Mapping[str, str]) -> str | None:
    return None if lease is None else names.get(lease, lease)
