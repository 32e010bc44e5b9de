"""What serves one model in a frontend: its fleet, its dispatcher, its application, and what is in flight for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from components.frontend.dispatcher import BusDispatcher
from components.frontend.http.models import ModelEntry
from components.frontend.http.waking import WorkersHere
from components.frontend.migration.rebalancer import Rebalancer
from components.frontend.placing import Assigner, LocalAssigner, RouterAssigner
from components.frontend.prefill import PrefillJobs
from components.frontend.requests.live_requests import RequestEvents
from components.frontend.settings import FrontendSettings, limits_of
from dynamo_local.bus.jetstream.live_settings import LiveSettingsWatch
from dynamo_local.bus.nats import Bus, publish_event
from dynamo_local.bus.presence import Announcer, FleetWatch
from dynamo_local.core.fleet.view import PREFILL_ROLE, WORKER_ROLES
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.live_settings import LiveSettings
from dynamo_local.core.messages.endpoints import ServedAdapter
from dynamo_local.core.messages.presence import Counts, MigrationCounts
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.migration import rebalancing
from dynamo_local.core.ports import Dispatcher, Progress
from dynamo_local.core.request import disaggregation
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.core.subjects import Subjects
from dynamo_local.monitor.graph_watch import GraphWatch
from dynamo_local.monitor.metrics import FrontendState
from dynamo_local.sdk.config.schema import build_settings
from dynamo_local.tasks import TaskGuard

_NOTE_AFTER_S = 0.1
"""Between a change of what is in flight and its announcement, which is one for all changes of that time."""


class Application(Protocol):
    """The OpenAI application of one model (engine/vllm/frontend/application.py)."""

    @property
    def paths(self) -> frozenset[str]: ...
    @property
    def vocabulary(self) -> int | None: ...
    async def start(self, progress: Progress) -> None: ...
    async def close(self) -> None: ...
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...
    async def cards(self) -> list[dict[str, Any]]: ...
    async def serve_adapters(self, adapters: Collection[ServedAdapter]) -> None: ...


MakeApplication = Callable[[Mapping[str, Any], Path, Dispatcher], Application]
"""Makes the application of a model from the frontend's configuration for it, and the process's private folder."""


@dataclass(frozen=True)
class ModelScope:
    """What a model is served with: the connection and the subjects of its processes, and the frontend's lease.

    `announcer` tells these processes of the frontend.
    """

    bus: Bus
    subjects: Subjects
    lease: str
    tasks: TaskGuard
    announcer: Announcer
    private_dir: Path


@dataclass(frozen=True)
class ModelPlan:
    """How a model is served. `config`: the frontend's configuration for it. `routed`: there is a router. `roles`: of
    the services in the model's graph. `names`: by which requests ask for the model, as far as they are known."""

    config: Mapping[str, Any]
    routed: bool
    roles: Sequence[str]
    names: tuple[str, ...] = ()


class ServedModel:
    """Serves one model. `entry` is what the gate knows of it."""

    def __init__(self, scope: ModelScope, plan: ModelPlan, make: MakeApplication, entry: ModelEntry) -> None:
        """Raises ConfigError."""
        settings = build_settings(FrontendSettings, "Frontend", plan.config)
        self.scope = scope
        self.plan = plan
        self.fleet = FleetWatch(scope.bus, scope.subjects)
        self.graph = GraphWatch(scope.bus, scope.subjects, self.fleet)
        configured = build_settings(LiveSettings, "Frontend", plan.config)
        self._live_settings = LiveSettingsWatch(scope.bus, scope.subjects, configured)
        self._prefill_jobs = self._make_prefill_jobs()
        self.dispatcher = BusDispatcher(
            scope.bus,
            scope.subjects,
            scope.lease,
            self.fleet,
            self._assigner(),
            scope.tasks,
            RecoveryDeadlines(request_s=settings.request_timeout_s, recovery_s=settings.recovery_timeout_s),
            self._prefill_jobs,
        )
        self._rebalancer = Rebalancer(self.dispatcher.migrations, self.fleet, self._rebalancing, scope.tasks)
        self._application = make(plan.config, scope.private_dir, self.dispatcher)
        self.entry = entry
        self.entry.limits, self.entry.on_change = limits_of(settings, plan.config), self._on_sequences
        self.entry.members, self.entry.pauses = self.fleet.view.members, self.dispatcher.pauses
        self.dispatcher.admin.held = self.entry.held_rows
        self.dispatcher.table.placer.on_wait = self.entry.look
        self.fleet.subscribe(lambda _: self._on_fleet())
        self.on_counts: Callable[[], None] = lambda: None
        """Called when `counts` has changed."""
        self.names = plan.names
        """Names of the model and its adapters, as the application has them."""
        self._migrations: MigrationCounts | None = None
        self._noting: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """The model's first name, as metrics label it."""
        return next(iter(self.names), "")

    @property
    def state(self) -> FrontendState:
        """Values of the frontend for this model, for metrics."""
        migrations = self.dispatcher.migrations.statistics
        return FrontendState(
            self.dispatcher.live_requests,
            self.plan.roles,
            None if self._prefill_jobs is None else self._prefill_jobs.outcomes,
            migrations.outcomes,
            migrations.pulled_tokens,
            migrations.pulled_bytes,
            self.entry.conversations.cold,
        )

    async def start(self, progress: Progress) -> None:
        """Follow the fleet, and build the application. Raises EngineError, BusError."""
        tasks = self.scope.tasks
        await self._live_settings.start()
        tasks.spawn("settings", self._live_settings.run())
        await self.dispatcher.start()
        self._rebalancer.start()
        await self.graph.start()
        await self.fleet.start()
        tasks.spawn("fleet", self.fleet.run())
        if PREFILL_ROLE in self.plan.roles:
            tasks.spawn("queue length", self.graph.follow_queue())
        self.dispatcher.migrations.statistics.subscribe(self._on_migrations)
        self.dispatcher.migrations.record = self._record
        news = RequestEvents(self.dispatcher.table.requests, self._watcher_of)
        self.dispatcher.table.on_end = news.end
        tasks.spawn("events of requests", news.run(self.scope.bus, self.scope.subjects))
        await self._application.start(progress)
        await self._learn_names()
        self.entry.app, self.entry.cards = self._application, self._application.cards
        self.entry.paths, self.entry.vocabulary = self._application.paths, self._application.vocabulary
        self._note()

    async def serve_adapters(self, adapters: Collection[ServedAdapter]) -> None:
        """Serve these LoRA adapters beside those of the configuration."""
        await self._application.serve_adapters(adapters)
        await self._learn_names()

    def stop_migrations(self) -> None:
        """Begin no more migrations: the frontend drains."""
        self.dispatcher.migrations.stop()

    async def fail_all(self, why: str) -> None:
        """End all requests with this error as their answer."""
        table = self.dispatcher.table
        for live in list(table.requests.values()):
            await table.fail(live, why)

    async def close(self) -> None:
        """Cancel what is still under way, and end the application."""
        self.entry.app = None
        await self.dispatcher.cancel_all()
        if self._noting is not None:
            self._noting.cancel()
        await self._application.close()

    def why_no_worker(self) -> str | None:
        """Return why the model takes no requests, or None."""
        return None if self.fleet.view.ready() else "no worker is ready"

    @property
    def workers(self) -> WorkersHere:
        """The model's workers, as this frontend sees them."""
        view = self.fleet.view
        parked = any(each.state == "parked" and each.role in WORKER_ROLES for each in view.members())
        return WorkersHere(parked, bool(view.ready()), self.dispatcher.table.placer.waiting > 0)

    def _on_fleet(self) -> None:
        view = self.fleet.view
        parked = {each.lease for each in view.members() if each.state == "parked"}
        self.entry.conversations.follow({each.lease for each in view.ready()}, parked)
        self.entry.look()

    async def _learn_names(self) -> None:
        self.names = tuple(card["id"] for card in await self._application.cards())

    def _on_sequences(self) -> None:
        told = self.scope.announcer.presence.counts or Counts()
        if (self.entry.line.sequences.total and not told.held) or (self.entry.demand and not told.in_flight):
            # The server acts on requests that wait, and gives away the devices of an endpoint without requests.
            self.scope.announcer.update(counts=self.counts())
            self.on_counts()
        elif self._noting is None:
            self._noting = asyncio.get_running_loop().call_later(_NOTE_AFTER_S, self._note)

    def _on_migrations(self, counts: MigrationCounts) -> None:
        self._migrations = counts
        self._note()

    def _note(self) -> None:
        self._noting = None
        self.scope.announcer.note(counts=self.counts())
        self.on_counts()

    def counts(self) -> Counts:
        """Return what is in flight, held and migrated, as presences tell it."""
        entry = self.entry
        return Counts(
            migrations=self._migrations,
            in_flight=entry.demand,
            held=entry.line.sequences.total,
            queued=entry.tasks.queued,
            taken=entry.tasks.taken,
        )

    def _record(self, event: Event) -> None:
        scope = self.scope
        scope.tasks.spawn("event", publish_event(scope.bus, scope.subjects, event))

    def _watcher_of(self, lease: str) -> str:
        worker = self.fleet.view.get(lease)
        return "" if worker is None else worker.watcher

    def _assigner(self) -> Assigner:
        scope = self.scope
        local = LocalAssigner(self.fleet, scope.lease)
        return RouterAssigner(scope.bus, scope.subjects, scope.lease, local) if self.plan.routed else local

    def _make_prefill_jobs(self) -> PrefillJobs | None:
        if PREFILL_ROLE not in self.plan.roles:
            return None
        scope = self.scope
        return PrefillJobs(scope.bus, scope.subjects, scope.lease, self.fleet, self._prefill_limits)

    def _prefill_limits(self) -> disaggregation.PrefillLimits:
        """Return the limits that hold now: `dynamo config set` may have changed them."""
        settings = self._live_settings.current
        return disaggregation.PrefillLimits(settings.max_local_prefill_length, settings.max_prefill_queue_size)

    def _rebalancing(self) -> rebalancing.RebalancingLimits | None:
        """Return the limits that hold now; None: rebalancing is off."""
        settings = self._live_settings.current
        if not settings.rebalance:
            return None
        return rebalancing.RebalancingLimits(
            below=settings.rebalance_below, above=settings.rebalance_above, period_s=settings.rebalance_period_s
        )
