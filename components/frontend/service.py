"""The frontend service: vLLM's OpenAI server in front of all workers, for one model or many. It keeps the log of every
request."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.dynamo_config import from_dynamo
from components.frontend.answers.answers import Answers
from components.frontend.answers.rest import AnswersRest
from components.frontend.async_tasks.calling import Calling
from components.frontend.async_tasks.keeper import TaskKeeper
from components.frontend.async_tasks.rest import TasksRest
from components.frontend.async_tasks.running import Surroundings as TaskSurroundings
from components.frontend.batches.pacing import QueuedWork, room_for_tasks
from components.frontend.batches.run import BatchKeeper
from components.frontend.endpoints.model import Application
from components.frontend.endpoints.revision import FrontendIdentity
from components.frontend.endpoints.served_models import BoardWatch, ServedModels
from components.frontend.http.forwarding import Forwarding
from components.frontend.http.gate import Administration, HttpGate, SettingNames
from components.frontend.http.usage import FrontendUsage
from components.frontend.keys.known import KeyFile, KeyFiles, KnownKeys
from components.frontend.keys.ticket import Ticket
from components.frontend.limits.places import Counters, Places
from components.frontend.limits.rooms import Rooms
from components.frontend.metrics import FrontendMetrics
from components.frontend.request_context import request_here
from components.frontend.settings import FrontendSettings, limits_of
from components.frontend.stored.rest import Stores
from components.planner import Planner
from components.router import Router
from components.vllm import PRELOAD
from components.workers import PrefillWorker, VllmWorker
from dynamo_local.bus.nats import publish_event
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.addresses import host_in_url
from dynamo_local.core.errors import PortInUseError
from dynamo_local.core.fleet.view import ENGINE_ROLES, FRONTEND_ROLE
from dynamo_local.core.http.asgi import App
from dynamo_local.core.http.paths import RESPONSES, TASKS
from dynamo_local.core.live_settings import LiveSettings
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import HTTP_HOST_ENV, HTTP_PORT_ENV
from dynamo_local.core.ports import Dispatcher
from dynamo_local.engine.vllm.arguments import LOGGING, adapter_schema, engine_schema, server_schema
from dynamo_local.monitor.exposition import expose
from dynamo_local.monitor.graph_watch import GraphWatch
from dynamo_local.monitor.metrics import (
    HOLD_SECONDS,
    MIGRATION_GAP_SECONDS,
    MIGRATION_GAP_STEPS,
    Distribution,
    ModelState,
    Sample,
    samples,
)
from dynamo_local.process.context import ServiceContext
from dynamo_local.process.listener import LISTENER_ENV, bind, take_over
from dynamo_local.sdk import Service, async_on_shutdown, async_on_start, combine, depends, schema_of, service
from state.answers.folder import AnswerFolder
from state.async_tasks.secret import callback_secret
from state.async_tasks.store import TaskStore
from state.paths import StatePaths

if TYPE_CHECKING:
    from dynamo_local.engine.vllm.frontend.server import HttpServer


@service(
    config=combine(
        schema_of(FrontendSettings), schema_of(LiveSettings), engine_schema(), server_schema(), adapter_schema()
    ),
    role=FRONTEND_ROLE,
    preload=PRELOAD,
    rewrite=from_dynamo,
)
class Frontend(Service):
    """The OpenAI API of the graph."""

    router = depends(Router)
    workers = depends(VllmWorker)
    prefill_workers = depends(PrefillWorker)
    planner = depends(Planner)
    """The frontend does not call the planner; with the dependency, a graph starts it."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._settings = context.settings(FrontendSettings)
        self._limits = limits_of(self._settings, context.config)
        self._keys = KeyFile(self._settings.api_key_file, "api-key-file")
        self._admin_keys = KeyFile(self._settings.admin_key_file, "admin-key-file")
        self._paths = paths = StatePaths.of(context.namespace, os.environ)
        places = Places(paths.limits_file)
        self._counters, self._rooms = Counters(places), Rooms(places)
        routed = context.has(Router.__name__)
        identity = FrontendIdentity(
            *(context.watcher, context.lease, context.bus, context.private_dir), routed=routed, room=self._rooms.of
        )
        self._known_keys = KnownKeys(paths, self._counters.keys_changed)
        self.served = ServedModels(identity, paths, context.tasks, self._application, self._limits)
        self.served.on_counts = lambda counts: context.announcer.note(counts=counts)
        self._usage = FrontendUsage(paths, context.lease)
        self._stores = Stores(paths, self._settings)
        self._answers = Answers(AnswerFolder(paths), self._settings, context.tasks)
        self._board = BoardWatch(paths.board_file, context.bus, context.subjects, self.served.follow)
        self._fleet = FleetWatch(context.bus, context.subjects)
        self._graph = GraphWatch(context.bus, context.subjects, self._fleet)
        self._metrics = FrontendMetrics(
            context.bus, context.subjects, context.lease, self._fleet, self._usage.samples_by_key
        )
        self._draining = False
        self._server: HttpServer | None = None
        self._batches: BatchKeeper | None = None
        self._task_store = TaskStore(paths, self._settings)
        self._tasks: TaskKeeper | None = None
        self._calling = Calling(self._settings, partial(callback_secret, paths), time.time)

    @async_on_start
    async def start(self) -> None:
        """Serve HTTP. The process is ready then, and /health reports whether a model is."""
        listener = await asyncio.to_thread(api_listener)
        context = self._context
        loop, announcer = asyncio.get_running_loop(), context.announcer

        def progress(detail: str) -> None:
            loop.call_soon_threadsafe(lambda: announcer.update(detail=detail))

        await self._graph.start()
        await self._fleet.start()
        context.tasks.spawn("fleet", self._fleet.run())
        # Whoever connects to a frontend that was started again finds the endpoints that there are.
        await self._board.start()
        context.tasks.spawn("board of endpoints", self._board.run())
        if any(service.role in ENGINE_ROLES for service in context.graph.services):
            await self.served.main_is_built(progress)
        self._server = self._make_server()
        serving = await self._server.start(listener, progress)
        await self._answers.start()
        context.tasks.spawn("usage", self._usage.run())
        context.tasks.spawn("stored files", self._stores.files_rest.run())
        expose(self._samples, self._distributions)
        await self._metrics.start()
        context.tasks.spawn("http", _until_stopped(serving, lambda: self._draining))
        announcer.update(url=_url(listener, tls=bool(context.config.get("ssl-certfile"))))

    @async_on_shutdown
    async def stop(self) -> None:
        """Refuse new requests and let those under way finish."""
        self._draining = True
        if self._batches is not None:
            await self._batches.stop()
        if self._tasks is not None:
            await self._tasks.stop()
        await self._answers.close()
        self.served.table.wake()
        self.served.stop_migrations()
        if self._server is not None:
            await self._server.stop(self._settings.drain_timeout_s)
        await self.served.close()
        self._usage.close()

    def _application(self, config: Mapping[str, Any], private_dir: Path, dispatcher: Dispatcher) -> Application:
        from dynamo_local.engine.vllm.frontend.application import ModelApplication

        # A process has one log, whichever model was built last.
        own = self._context.config
        log = {name: own.get(name) for name in LOGGING}
        return ModelApplication({**config, **log}, private_dir, dispatcher)

    def _samples(self) -> Iterator[Sample]:
        """Return the samples that /metrics shows beside vLLM's own."""
        # The processes that work for all models.
        shared = ModelState("", self._graph.snapshot())
        served = [ModelState(model.name, model.graph.snapshot(), model.state) for model in self.served.models]
        table = self.served.table
        yield from samples([shared, *served], self.served.board.endpoints, table.held_by_class(), table.refused())
        yield from self._usage.samples()

    def _distributions(self) -> Iterator[Distribution]:
        """Return the histograms that /metrics shows beside vLLM's own."""
        for model in self.served.models:
            migrations = model.dispatcher.migrations.statistics
            yield Distribution(MIGRATION_GAP_SECONDS, (model.name,), migrations.gap_s)
            yield Distribution(MIGRATION_GAP_STEPS, (model.name,), migrations.gap_steps)
        for series, histogram in self.served.table.hold_times.histograms.items():
            yield Distribution(HOLD_SECONDS, series, histogram)

    def _make_server(self) -> HttpServer:
        from dynamo_local.engine.vllm.frontend.server import HttpServer

        context = self._context
        return HttpServer(context.config, context.private_dir, self._gate, self._limits, self._cards, self._rooms)

    async def _cards(self) -> list[dict[str, Any]]:
        """Return the models that who asks may use."""
        return await self.served.table.cards(request_here().caller.allows)

    def _gate(self, app: App) -> HttpGate:
        context = self._context
        answers = AnswersRest(self._answers, lambda: self._draining)
        calling = self._calling
        tasks = TasksRest(self._task_store, self.served.table, self._limits, calling)
        gate = HttpGate(
            self._metrics.around(app),
            limits=self._limits,
            models=self.served.table,
            is_draining=lambda: self._draining,
            api_keys=self._keys.keys,
            names=SettingNames(type(self).__name__, server_schema().keys()),
            administration=Administration(self._admin_keys.keys, Forwarding(self._paths)),
            known_keys=self._known_keys,
            admit=partial(Ticket, self._counters, time.monotonic),
            stores={**self._stores.handlers, RESPONSES: answers, TASKS: tasks},
            meter=self._usage.meter,
            answers=answers,
            rooms=self._rooms,
        )
        self._answers.connect(gate.answer_kept, gate.caller_for)
        files = KeyFiles(
            (self._keys, self._admin_keys),
            lambda: gate.take_keys(self._keys.keys, self._admin_keys.keys),
            self._note_secret,
        )
        context.tasks.spawn("files of keys", files.run())
        self._batches = self._stores.keeper(gate, self.served.table)
        context.tasks.spawn("batches", self._batches.run())
        queued = QueuedWork(
            self.served.table, lambda: {} if self._tasks is None else self._tasks.tasks(), self._answers.waiting
        )
        around = TaskSurroundings(
            gate.answer_kept,
            gate.caller_for,
            self._settings,
            calling,
            room=partial(room_for_tasks, self.served.table),
            on_taken=queued.tell,
        )
        tasks.keeper = self._tasks = TaskKeeper(self._task_store, around)
        context.tasks.spawn("asynchronous tasks", self._tasks.run())
        context.tasks.spawn("queued work", queued.run())
        return gate

    async def _note_secret(self, what: str, why: str) -> None:
        context = self._context
        await publish_event(context.bus, context.subjects, Event("secret", what, why, str(context.watcher)))


def api_listener() -> socket.socket:
    """Return the socket of the API: the server's, or where none hands one over, one bound to the address in the
    environment. Blocks. Raises PortInUseError, SupervisorError."""
    name = os.environ.get(LISTENER_ENV)
    if name is not None:
        return take_over(name)
    return bind(os.environ.get(HTTP_HOST_ENV, "127.0.0.1"), int(os.environ.get(HTTP_PORT_ENV, "0")))


def _url(listener: socket.socket, *, tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{host_in_url(host)}:{port}"


async def _until_stopped(serving: asyncio.Task[None], is_draining: Any) -> None:
    """Wait for the HTTP server's end. Raises PortInUseError if the server ends by itself, which ends the process."""
    await asyncio.shield(serving)
    if not is_draining():
        raise PortInUseError("the HTTP server ended by itself")
