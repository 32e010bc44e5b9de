"""All models of one frontend: the revisions on the board of endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from components.frontend.endpoints.model import MakeApplication, ServedModel
from components.frontend.endpoints.revision import FrontendIdentity, ServedRevision, told
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.waking import Waking, WakingServer, WorkersHere
from dynamo_local.bus.nats import Bus, RawMessage
from dynamo_local.core.endpoints.status import Standing, is_coming, standings
from dynamo_local.core.errors import DecodeError
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointView
from dynamo_local.core.messages.presence import Counts, MigrationCounts
from dynamo_local.core.migration.protocol import migrations_together
from dynamo_local.core.names import MAIN, endpoint_of
from dynamo_local.core.ports import Progress
from dynamo_local.core.subjects import Subjects
from dynamo_local.log_once import LogOnce
from dynamo_local.tasks import TaskGuard
from state.endpoints.board import decode_board
from state.paths import StatePaths

_log = logging.getLogger(__name__)


class ServedModels:
    """Keeps the models of a frontend as the board says. `table` is what the gate looks into."""

    def __init__(
        self,
        identity: FrontendIdentity,
        paths: StatePaths,
        tasks: TaskGuard,
        make: MakeApplication,
        limits: AdmissionLimits,
    ) -> None:
        """`limits`: of models until theirs are known."""
        self._identity = identity
        self._paths = paths
        self._server = WakingServer(paths)
        self._tasks = tasks
        self._make = make
        self._limits = limits
        self._absent: dict[str, ModelEntry] = {}
        """What is known of endpoints without a revision that takes requests. Requests that are held count there."""
        self._views: dict[str, EndpointView] = {}
        self._wakings: dict[str, Waking] = {}
        self._revisions: dict[str, ServedRevision] = {}
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._took: frozenset[str] = frozenset()
        self._has_main = asyncio.Event()
        self._ended: MigrationCounts | None = None
        """Migrations of revisions that are given up."""
        self.board = Board()
        self.table = ModelTable(self._entries())
        self.on_counts: Callable[[Counts], None] = lambda _: None
        """Called with the counts of all models together when those of one have changed."""

    @property
    def models(self) -> Iterator[ServedModel]:
        """The models whose applications are built."""
        yield from (each.model for each in self._revisions.values() if each.model is not None)

    async def main_is_built(self, progress: Progress) -> None:
        """Wait until the model that the graph has itself is on the board and built. Raises what has failed."""
        await self._has_main.wait()
        for revision, served in list(self._revisions.items()):
            if endpoint_of(revision) == MAIN:
                await served.built(progress)

    def follow(self, board: Board) -> None:
        """Do what the board says: requests that come from here on go where it says."""
        self.board = board
        known = standings(board, self._took)
        self._took = frozenset(name for name in known if name in self._took or known[name] is Standing.TAKES)
        self._views = {view.spec.name: view for view in board.endpoints}
        listed = {each.revision: each for each in board.revisions}
        for revision in [revision for revision in self._revisions if revision not in listed]:
            gone = self._revisions.pop(revision)
            gone.give_up()
            if gone.model is not None:
                self._ended = migrations_together([self._ended, gone.model.counts().migrations])
        for each in listed.values():
            served = self._revisions.get(each.revision) or self._begin(each)
            view = self._views.get(endpoint_of(each.revision))
            served.follow(each, known[each.revision], None if view is None else view.status)
        if any(endpoint_of(revision) == MAIN for revision in self._revisions):
            self._has_main.set()
        self.table.replace(self._entries())
        for name in self._absent.keys() - self._views.keys():
            del self._absent[name]
        for waking in self._wakings.values():
            waking.look()
        for name in self._wakings.keys() - self._views.keys() - {endpoint_of(each) for each in self._revisions}:
            del self._wakings[name]

    def _note_counts(self) -> None:
        each = [model.counts() for model in self.models]
        self.on_counts(
            Counts(
                migrations=migrations_together([self._ended, *(one.migrations for one in each)]),
                in_flight=sum(one.in_flight or 0 for one in each),
                held=sum(one.held or 0 for one in each),
                queued=sum(one.queued or 0 for one in each),
                taken=sum(one.taken or 0 for one in each),
            )
        )

    def refresh(self) -> None:
        """Take over names of models that have become known."""
        self.table.replace(self._entries())

    def stop_migrations(self) -> None:
        """Begin no more migrations: the frontend drains."""
        for model in self.models:
            model.stop_migrations()

    async def close(self) -> None:
        """Give up all revisions: the process ends. What is still being built is not waited for."""
        running = list(self._running.values())
        for revision, served in self._revisions.items():
            served.give_up(at_once=True)
            if served.model is None and revision in self._running:
                self._running[revision].cancel()
        self._revisions.clear()
        if running:
            await asyncio.wait(running)

    def _begin(self, listed: BoardRevision) -> ServedRevision:
        graph = self._paths.graph_of(listed.revision)
        served = ServedRevision(self._identity, listed, graph, self._make, self._limits)
        served.on_counts = self._note_counts
        self._revisions[listed.revision] = served
        self._may_wake(served.entry, endpoint_of(listed.revision))
        before = self._running.get(listed.revision)
        name = f"revision {listed.revision}"
        self._running[listed.revision] = self._tasks.spawn(name, self._run(served, listed.revision, before))
        return served

    async def _run(self, served: ServedRevision, revision: str, before: asyncio.Task[Any] | None) -> None:
        if before is not None:
            # The same revision was given up just now.
            await asyncio.wait({before})
        try:
            await served.run(self.refresh)
        finally:
            if self._running.get(revision) is asyncio.current_task():
                del self._running[revision]

    def _entries(self) -> Iterator[ModelEntry]:
        claimed: set[str] = set()
        for served in self._revisions.values():
            if served.standing is Standing.TAKES:
                names = served.names
                claimed.update(names)
                served.entry.names = names
                yield served.entry
        for view in self.board.endpoints:
            names = tuple(name for name in _names(view) if name not in claimed)
            if names and view.status.state != "deleting":
                yield self._not_served(names, view)

    def _not_served(self, names: tuple[str, ...], view: EndpointView) -> ModelEntry:
        """Return the entry of an endpoint without a revision that takes requests."""
        name = view.spec.name

        async def cards() -> list[dict[str, Any]]:
            return [_card(each, view) for each in names]

        def why_not() -> str:
            return told(name, self._views[name].status) if name in self._views else f"endpoint {name} is deleted"

        def comes() -> bool:
            return name in self._views and is_coming(self._views[name].status)

        entry = self._absent.get(name)
        if entry is None:
            entry = self._absent[name] = ModelEntry(names, why_not, self._limits, comes=comes)
            entry.room = self._identity.room(name)
            self._may_wake(entry, view.spec.adapter_of or name)
        entry.names, entry.cards = names, cards
        return entry

    def _may_wake(self, entry: ModelEntry, endpoint: str) -> None:
        """Have the endpoint woken for requests that are held at this entry."""
        waking = self._wakings.get(endpoint)
        if waking is None:
            waking = self._wakings[endpoint] = Waking(
                endpoint,
                self._server,
                lambda: self._views.get(endpoint),
                lambda: self._workers_of(endpoint),
                self._tasks.spawn,
            )
        entry.waking = waking
        waking.lines.add(entry.line)

    def _workers_of(self, endpoint: str) -> WorkersHere:
        for revision, served in self._revisions.items():
            if served.standing is Standing.TAKES and endpoint_of(revision) == endpoint:
                return served.workers
        return WorkersHere()


def _names(view: EndpointView) -> tuple[str, ...]:
    return view.served_names or (view.spec.name,)


def _card(name: str, view: EndpointView) -> dict[str, Any]:
    """Return an endpoint as vLLM lists a model, with its status beside."""
    return {
        "id": name,
        "object": "model",
        "created": int(view.created_at),
        "owned_by": "vllm",
        "root": view.spec.model,
        "parent": view.spec.adapter_of,
        "max_model_len": None,
        "permission": [],
        "status": {"state": view.status.state, "reason": view.status.reason},
    }


# Follows the board of endpoints: the file that the server writes for its frontends.

POLL_S = 2.0
"""Between two looks at the file. The server tells of each change as well, which may be lost."""


class BoardWatch:
    """Calls `on_board` with the board whenever it has changed. A board that cannot be read is as if it had not."""

    def __init__(
        self, path: Path, bus: Bus, subjects: Subjects, on_board: Callable[[Board], None], *, poll_s: float = POLL_S
    ) -> None:
        self._path = path
        self._bus = bus
        self._subject = subjects.board
        self._on_board = on_board
        self._poll_s = poll_s
        self._told = asyncio.Event()
        self._last: bytes | None = None
        self._log_once = LogOnce(_log)

    async def start(self) -> None:
        """Read the board if there is one, and listen to changes."""

        async def on_change(_: RawMessage) -> None:
            self._told.set()

        await self._bus.subscribe(self._subject, on_change)
        self._read()

    async def run(self) -> None:
        """Follow the board until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._told.wait()
            except TimeoutError:
                pass
            self._told.clear()
            self._read()

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._log_once.warn(f"the board of endpoints cannot be read, the last one holds: {error}")
            return
        if data == self._last:
            return
        try:
            board = decode_board(data)
        except DecodeError as error:
            self._log_once.warn(f"the board of endpoints is damaged, the last one holds: {error}")
            return
        self._log_once.clear()
        self._last = data
        self._on_board(board)
