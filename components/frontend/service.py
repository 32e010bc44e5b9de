"""The frontend service: vLLM's OpenAI server in front of all workers. It keeps the log of every request."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from components.dynamo_config import from_dynamo
from components.frontend.assigner import Assigner, LocalAssigner, RouterAssigner
from components.frontend.dispatcher import BusDispatcher
from components.frontend.http.gate import GateState, HttpGate, SettingNames
from components.frontend.migration.rebalancer import Rebalancer
from components.frontend.prefill_jobs import PrefillJobs
from components.planner import Planner
from components.router import Router
from components.workers import PrefillWorker, VllmWorker
from dynamo_local.bus.events import publish_event
from dynamo_local.bus.live_settings import LiveSettingsWatch
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import ConfigError, PortInUseError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.http.admission import AdmissionLimits
from dynamo_local.core.live_settings import LiveSettings
from dynamo_local.core.messages.events import Event
from dynamo_local.core.messages.presence import Counts
from dynamo_local.core.migration import rebalancing
from dynamo_local.core.names import HTTP_HOST_ENV, HTTP_PORT_ENV
from dynamo_local.core.request import disaggregation
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.engine.vllm import VLLM_PRELOAD
from dynamo_local.engine.vllm.arguments import adapter_schema, engine_schema, server_schema
from dynamo_local.monitor.exposition import expose
from dynamo_local.monitor.graph_watch import GraphWatch
from dynamo_local.monitor.metrics import MIGRATION_GAP_SECONDS, MIGRATION_GAP_STEPS, FrontendState, Sample, samples
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk import Service, async_on_shutdown, async_on_start, combine, depends, schema_of, service

_UNREAD_MS = 60_000
"""How long data sent to a client may remain unacknowledged, in milliseconds."""


@dataclass(frozen=True)
class FrontendSettings(AdmissionLimits):
    """The frontend's own settings, beside those of vLLM's server and engine."""

    api_key_file: Path | None = field(
        default=None, metadata={"help": "File with API keys, one per line. Without it, no key is required."}
    )
    request_timeout_s: float = field(
        default=600.0, metadata={"help": "Maximum time from the arrival of a request to its last token, in s."}
    )
    recovery_timeout_s: float = field(
        default=120.0, metadata={"help": "How long a request that lost its worker waits for another worker, in s."}
    )
    drain_timeout_s: float = field(
        default=15.0, metadata={"help": "How long requests in flight may take to finish when the server stops, in s."}
    )


@service(
    config=combine(
        schema_of(FrontendSettings), schema_of(LiveSettings), engine_schema(), server_schema(), adapter_schema()
    ),
    role="frontend",
    preload=VLLM_PRELOAD,
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
        self._limits = _with_max_logprobs(self._settings, context.config)
        self._fleet = FleetWatch(context.bus, context.subjects)
        self._graph = GraphWatch(context.bus, context.subjects, self._fleet)
        self._live_settings = LiveSettingsWatch(context.bus, context.subjects, context.settings(LiveSettings))
        self._prefill_jobs = self._make_prefill_jobs()
        self._dispatcher = BusDispatcher(
            context.bus,
            context.subjects,
            context.lease,
            self._fleet,
            self._assigner(),
            context.tasks,
            RecoveryDeadlines(request_s=self._settings.request_timeout_s, recovery_s=self._settings.recovery_timeout_s),
            self._prefill_jobs,
        )
        self._rebalancer = Rebalancer(self._dispatcher.migrations, self._fleet, self._rebalancing, context.tasks)
        self._draining = False
        self._server: Any = None

    @async_on_start
    async def start(self) -> None:
        """Serve HTTP. The process is ready then, and /health reports whether a worker is."""
        from dynamo_local.engine.vllm.frontend.server import OpenAIServer

        listener = bind()
        await self._live_settings.start()
        self._context.tasks.spawn("settings", self._live_settings.run())
        await self._dispatcher.start()
        self._rebalancer.start()
        await self._graph.start()
        await self._fleet.start()
        context = self._context
        context.tasks.spawn("fleet", self._fleet.run())
        if PREFILL_ROLE in self._roles():
            context.tasks.spawn("queue length", self._graph.follow_queue())
        self._server = OpenAIServer(context.config, context.private_dir, self._dispatcher, self._gate(), self._limits)
        loop, announcer = asyncio.get_running_loop(), context.announcer

        def progress(detail: str) -> None:
            loop.call_soon_threadsafe(lambda: announcer.update(detail=detail))

        serving = await self._server.start(listener, progress)
        migrations = self._dispatcher.migrations.statistics
        migrations.subscribe(lambda counts: announcer.note(counts=Counts(migrations=counts)))
        self._dispatcher.migrations.record = self._record
        expose(self._samples, {MIGRATION_GAP_SECONDS: migrations.gap_s, MIGRATION_GAP_STEPS: migrations.gap_steps})
        context.tasks.spawn("http", _until_stopped(serving, lambda: self._draining))
        announcer.update(url=_url(listener))

    def _record(self, event: Event) -> None:
        context = self._context
        context.tasks.spawn("event", publish_event(context.bus, context.subjects, event))

    @async_on_shutdown
    async def stop(self) -> None:
        """Refuse new requests and let those under way finish."""
        self._draining = True
        self._dispatcher.migrations.stop()
        if self._server is not None:
            await self._server.stop(self._settings.drain_timeout_s)
        await self._dispatcher.cancel_all()

    def _assigner(self) -> Assigner:
        local = LocalAssigner(self._fleet, self._context.lease)
        if not self._context.has(Router.__name__):
            return local
        return RouterAssigner(self._context.bus, self._context.subjects, self._context.lease, local)

    def _make_prefill_jobs(self) -> PrefillJobs | None:
        context = self._context
        if not context.has(PrefillWorker.__name__):
            return None
        return PrefillJobs(context.bus, context.subjects, context.lease, self._fleet, self._prefill_limits)

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

    def _roles(self) -> list[str]:
        return [service.role for service in self._context.graph.services]

    def _samples(self) -> Iterator[Sample]:
        """Return the samples that /metrics shows beside vLLM's own."""
        prefills = None if self._prefill_jobs is None else self._prefill_jobs.outcomes
        migrations = self._dispatcher.migrations.statistics
        state = FrontendState(
            self._dispatcher.live_requests,
            self._roles(),
            prefills,
            migrations.outcomes,
            migrations.pulled_tokens,
            migrations.pulled_bytes,
        )
        return samples(self._graph.snapshot(), state)

    def _gate(self) -> Any:
        state = GateState(has_worker=lambda: bool(self._fleet.view.ready()), is_draining=lambda: self._draining)
        keys = _read_keys(self._settings.api_key_file)
        names = SettingNames(type(self).__name__, server_schema().keys())

        def gate(app: Any) -> HttpGate:
            return HttpGate(app, limits=self._limits, state=state, api_keys=keys, names=names)

        return gate


def _with_max_logprobs(limits: AdmissionLimits, config: Mapping[str, Any]) -> AdmissionLimits:
    """Return the limits. vLLM's max-logprobs also sets max-candidates, if that is not set itself."""
    if "max-candidates" in config or config.get("max-logprobs") is None:
        return limits
    return replace(limits, max_candidates=config["max-logprobs"])


def bind() -> socket.socket:
    """Return a socket bound to the address that `dynamo serve` has chosen and found free. Raises PortInUseError."""
    host = os.environ.get(HTTP_HOST_ENV, "127.0.0.1")
    port = int(os.environ.get(HTTP_PORT_ENV, "0"))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off on the connections; otherwise it does not, and the
    # first token of every stream waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # A client that does not read its answer is disconnected: its requests would never end.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", "choose another --port") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _read_keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.expanduser().read_text().splitlines() if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error.strerror}") from error
    if not keys:
        # An empty file must not open the server to everybody.
        raise ConfigError(f"{path} holds no API key", "write one key per line, or leave api-key-file out")
    return keys


async def _until_stopped(serving: asyncio.Task[None], is_draining: Any) -> None:
    """Wait for the HTTP server's end. Raises PortInUseError if the server ends by itself, which ends the process."""
    await asyncio.shield(serving)
    if not is_draining():
        raise PortInUseError("the HTTP server ended by itself")
