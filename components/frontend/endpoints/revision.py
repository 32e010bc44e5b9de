"""A revision of an endpoint in a frontend: built, announced in the revision's scope, and given up."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from components.frontend.endpoints.model import MakeApplication, ModelPlan, ModelScope, ServedModel
from components.frontend.http.models import ModelEntry
from components.frontend.http.waking import WorkersHere
from components.frontend.limits.rooms import Room
from dynamo_local.bus.nats import Bus, BusPart
from dynamo_local.bus.presence import Announcer
from dynamo_local.core.endpoints.status import Standing, is_coming
from dynamo_local.core.errors import ConfigError, DynamoError
from dynamo_local.core.fleet.view import FRONTEND_ROLE
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.messages.endpoints import BoardRevision, EndpointStatus, ServedAdapter
from dynamo_local.core.messages.presence import Counts, Presence
from dynamo_local.core.names import Watcher, endpoint_of
from dynamo_local.core.ports import Progress
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.tasks import TaskGuard
from state.machine.identity import machine_id

_log = logging.getLogger(__name__)

_END_S = 5.0
"""Longest wait for the answers of requests that were failed to be written, in seconds."""
_LOOK_S = 0.05


@dataclass(frozen=True)
class FrontendIdentity:
    """The frontend process, as it announces itself in the scopes of revisions. `routed`: the server has a router.
    `room` returns what all frontends have under way for a model; None: there is only this one."""

    watcher: Watcher
    lease: str
    bus: Bus
    private_dir: Path
    routed: bool
    room: Callable[[str], Room | None] = lambda _: None

    def scope(self, revision: str) -> ModelScope:
        """Return what a revision is served with: a part of the connection, and tasks of its own."""
        bus = BusPart(self.bus)
        subjects = Subjects(self.watcher.namespace, revision)
        presence = Presence(
            str(self.watcher),
            self.watcher.service,
            FRONTEND_ROLE,
            self.lease,
            os.getpid(),
            "starting",
            counts=Counts(in_flight=0, held=0),
            started_at=time.monotonic(),
            machine=machine_id(),
            revision=revision,
        )
        return ModelScope(bus, subjects, self.lease, TaskGuard(), Announcer(bus, subjects, presence), self.private_dir)


class ServedRevision:
    """A revision's part in this frontend. `run` builds it, and ends when it has been given up.

    `entry` is the same object from the beginning to the end, so that what is in flight is counted in one place.
    """

    def __init__(
        self,
        identity: FrontendIdentity,
        listed: BoardRevision,
        graph: Path,
        make: MakeApplication,
        limits: AdmissionLimits,
    ) -> None:
        """`graph`: file with the revision's graph. `limits`: of requests until it has been read."""
        self.listed = listed
        self.standing = Standing.PREPARES
        self.status: EndpointStatus | None = None
        self.model: ServedModel | None = None
        self._identity = identity
        self._graph = graph
        self._make = make
        self._scope = identity.scope(listed.revision)
        self._served: frozenset[ServedAdapter] = frozenset()
        self._failure: str | None = None
        self._detail = ""
        self._given_up = asyncio.Event()
        self._ends_at_once = False
        self._changed = asyncio.Event()
        self._on_names: Callable[[], None] = lambda: None
        self.on_counts: Callable[[], None] = lambda: None
        """Called when the model's counts have changed."""
        self._error: DynamoError | None = None
        self._is_built = asyncio.Event()
        self._on_progress: Progress = lambda _: None
        self.entry = ModelEntry(listed.served_names, self._why_not, limits, comes=self._comes)
        self.entry.room = identity.room(listed.revision)

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which requests ask for the model and its adapters. Those of adapters that have been changed are not
        among them, until the application has taken that over: nobody is answered by an earlier one."""
        adapters = tuple(adapter.name for adapter in self.listed.adapters)
        if self.model is None:
            return tuple(dict.fromkeys((*self.listed.served_names, *adapters)))
        changed = {adapter.name for adapter in self._served ^ set(self.listed.adapters)}
        names = (*self.listed.served_names, *(name for name in self.model.names if name not in changed))
        return tuple(dict.fromkeys(names))

    @property
    def workers(self) -> WorkersHere:
        """The revision's workers, as this frontend sees them."""
        if self._failure is not None:
            return WorkersHere(ready=True)
        return WorkersHere() if self.model is None else self.model.workers

    async def built(self, progress: Progress) -> None:
        """Wait until the model is built, and tell the progress. Raises the DynamoError with which that has failed."""
        self._on_progress = progress
        await self._is_built.wait()
        if self._error is not None:
            raise self._error

    async def run(self, on_names: Callable[[], None]) -> None:
        """Serve the revision until it is given up. A failure of its application is announced, not raised.

        `on_names` is called when `names` may have changed.
        """
        self._on_names = on_names
        scope = self._scope
        scope.tasks.spawn(f"presence in {self.listed.revision}", scope.announcer.run())
        failed = asyncio.create_task(scope.tasks.failed(), name=f"tasks of {self.listed.revision}")
        serving = asyncio.create_task(self._serve(), name=f"serving {self.listed.revision}")
        try:
            await asyncio.wait({failed, serving}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                # As of every task of a process: it must not go on without one of its parts.
                serving.cancel()
                await failed
            await serving
        finally:
            failed.cancel()
            serving.cancel()
            await self._close()

    def follow(self, listed: BoardRevision, standing: Standing, status: EndpointStatus | None) -> None:
        """Take over what the board says. The gate sends no new request from here on to a revision that ends."""
        self.listed, self.standing, self.status = listed, standing, status
        self.entry.adapters = frozenset(adapter.name for adapter in listed.adapters)
        self._announce()
        self.entry.look()
        self._changed.set()

    def give_up(self, *, at_once: bool = False) -> None:
        """End: the revision has left the board, or (`at_once`) the process ends, and its requests need no answer."""
        self._ends_at_once = at_once
        self._given_up.set()
        self._changed.set()

    async def _serve(self) -> None:
        if self.standing is not Standing.ENDS:
            await self._start()
        while not self._given_up.is_set():
            self._changed.clear()
            await self._serve_adapters()
            await self._changed.wait()

    async def _start(self) -> None:
        try:
            model = ServedModel(self._scope, self._plan(), self._make, self.entry)
            model.on_counts = self.on_counts
            loop = asyncio.get_running_loop()
            await model.start(lambda detail: _soon(loop, self._progress, detail))
        except DynamoError as error:
            self._error, self._failure = error, str(error)
            _log.error("%s cannot be served: %s", self.listed.revision, error)
        else:
            self.model = model
            # Requests for adapters may come as soon as the frontend is ready for the revision.
            await self._serve_adapters()
            _log.info("%s is served as %s", self.listed.revision, ", ".join(self.listed.served_names))
        self._is_built.set()
        self._announce()
        self.entry.look()

    def _plan(self) -> ModelPlan:
        try:
            graph = ResolvedGraph.from_json(self._graph.read_bytes())
        except OSError as error:
            raise ConfigError(f"the graph of {self.listed.revision} cannot be read: {error.strerror}") from error
        frontend = graph.service(self._identity.watcher.service)
        names = list(self.listed.served_names)
        config = {**frontend.config, "served-model-name": names} if names else frontend.config
        roles = [service.role for service in graph.services]
        return ModelPlan(config, self._identity.routed, roles, tuple(names))

    async def _serve_adapters(self) -> None:
        if self.model is not None:
            adapters = self.listed.adapters
            await self.model.serve_adapters(adapters)
            self._served = frozenset(adapters)
            self._on_names()

    async def _close(self) -> None:
        if self.model is not None:
            if not self._ends_at_once:
                await self.model.fail_all(f"endpoint {endpoint_of(self.listed.revision)} serves this model no more")
                await self._until_idle()
            await self.model.close()
        await self._scope.bus.close()
        await self._scope.tasks.close()

    async def _until_idle(self) -> None:
        """Wait until the answers of requests that were failed have been written."""
        deadline = time.monotonic() + _END_S
        while self.entry.busy and time.monotonic() < deadline:  # noqa: ASYNC110  # not worth an event
            await asyncio.sleep(_LOOK_S)

    def _why_not(self) -> str | None:
        why = self._why_not_here()
        if why is None or self.status is None or self.status.state == "ready":
            return why
        return told(endpoint_of(self.listed.revision), self.status)

    def _comes(self) -> bool:
        return self._failure is None and (self.status is None or is_coming(self.status))

    def _why_not_here(self) -> str | None:
        if self._failure is not None:
            return self._failure
        if self.model is None:
            return f"the frontend prepares for it: {self._detail}" if self._detail else "the frontend prepares for it"
        if self.listed.yields:
            return f"it {self.listed.yields}"
        return self.model.why_no_worker()

    def _progress(self, detail: str) -> None:
        self._detail = detail
        self._on_progress(detail)
        self._announce()

    def _announce(self) -> None:
        if self.standing is Standing.ENDS:
            self._scope.announcer.update(state="draining", detail="")
        elif self._failure is not None:
            self._scope.announcer.update(state="failed", detail=self._failure)
        elif self.model is not None:
            self._scope.announcer.update(state="ready", detail="")
        else:
            self._scope.announcer.update(state="starting", detail=self._detail)


def told(endpoint: str, status: EndpointStatus) -> str:
    """Say of an endpoint that is not ready what the server says of it."""
    reason = f": {status.reason}" if status.reason else ""
    return f"endpoint {endpoint} is {status.state}{reason}"


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[str], None], detail: str) -> None:
    """Call on the event loop, from any thread."""
    loop.call_soon_threadsafe(call, detail)
