"""Asks the frontends of a running server for their requests, and has them migrate some.

A frontend answers once for each model that it serves, on the subjects of its own model and of each revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.bus.nats import Bus
from dynamo_local.control.answers import WatcherRow
from dynamo_local.core.errors import BusError, NobodyListensError
from dynamo_local.core.fleet.view import FRONTEND_ROLE
from dynamo_local.core.messages.admin import (
    MigrationOrder,
    MigrationReport,
    MigrationResult,
    RequestsAnswer,
    RequestsQuestion,
)
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.connect import ask, unanswered
from dynamo_local.supervisor.admin.scopes import known_revisions
from dynamo_local.supervisor.admin.status import list_watchers

_ANSWER_WITHIN_S = 5.0
_MIGRATED_WITHIN_S = 120.0


@dataclass(frozen=True)
class Scope:
    """The requests of one frontend, by its lease, for one revision."""

    frontend: str
    revision: str


@dataclass(frozen=True)
class AskedFrontends:
    """The frontends of a running server: its bus, its watchers, and the revisions whose requests are meant (`OWN` is
    one)."""

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
