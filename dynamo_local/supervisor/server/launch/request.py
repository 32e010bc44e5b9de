"""What is asked for, by `dynamo serve` or by the spec of an endpoint: a graph, with the settings that are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo_local.core.endpoints.adapters import settings_of
from dynamo_local.core.endpoints.spec import SERVED_NAME, EndpointSpec, served_names
from dynamo_local.core.errors import ConfigError, UsageError
from dynamo_local.engine.vllm.arguments import OF_SERVER, REFUSED_VARIABLES, every_argument
from dynamo_local.engine.vllm.command_line import flag_of
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.sdk.config.schema import canonical, check_variables
from dynamo_local.sdk.config.sections import Flag, Section
from dynamo_local.sdk.graph import Graph, load_graph
from dynamo_local.supervisor.server.launch.addresses import KV_NETWORK, check_kv_network
from dynamo_local.supervisor.server.launch.models import without_downloads_for_mockers
from dynamo_local.supervisor.server.launch.plan import LOCAL

AGGREGATED = "components.graphs.aggregated:Frontend"
DISAGGREGATED = "components.graphs.disaggregated:Frontend"
OF_ENDPOINTS = "components.graphs.endpoints:Frontend"
"""The graph of a server without a model of its own: endpoints are all that it serves."""

KV_STREAM = "kv-stream"
_FRONTENDS, _WORKERS, _PREFILL_WORKERS = "Frontend", "VllmWorker", "PrefillWorker"
_TENSOR_PARALLEL = "tensor-parallel-size"
_SIZES = (_TENSOR_PARALLEL, "pipeline-parallel-size", "prefill-context-parallel-size")


@dataclass(frozen=True)
class GraphRequest:
    """A graph, and what is given for it. `flags`: options that name no service, such as "--max-model-len";
    `overrides`: options of one service as typed, such as "--VllmWorker.seed=1". `namespace` None: the graph's own.
    `forks`: whether services may be forked from a fork server (process/forkserver)."""

    graph: Graph
    model: str | None = None
    flags: tuple[Flag, ...] = ()
    overrides: tuple[str, ...] = ()
    config: Path | None = None
    namespace: str | None = None
    forks: bool = True

    def resolve(self, chosen: Mapping[str, Section] = MappingProxyType({})) -> ResolvedGraph:
        """The graph with its settings. `chosen`: by service, what holds where nothing is given. Raises ConfigError."""
        given = (self.config, self.overrides, self.namespace, self.model)
        resolved = resolve(self.graph, *given, flags=self.flags, chosen=chosen)
        resolved = without_downloads_for_mockers(self.graph, resolved)
        return resolved if self.forks else without_preloads(resolved)


def without_preloads(graph: ResolvedGraph) -> ResolvedGraph:
    """The graph with no service forked: every process imports by itself."""
    services = tuple(msgspec.structs.replace(service, preload=None) for service in graph.services)
    return msgspec.structs.replace(graph, services=services)


@dataclass(frozen=True)
class ServeRequest:
    """What `dynamo serve` is asked for. None: not given.

    `graph`: as `module:Service`; None: `model` is to be served by one of our graphs, and `workers`, `prefill_workers`,
    `disagg`, `planner` (it acts) and `frontends` say by which, and how. `auto_parsers`: parsers of tools and reasoning
    may be chosen. `flags`, `overrides`, `config`, `forkserver`: as of a GraphRequest. `endpoints`: to create, or to
    update if they exist; `forget`: those that were ordered earlier are dropped. `environment`: where workers live
    (supervisor/places/cluster.py), and `cluster_address` the address of that cluster, as it takes it.
    """

    graph: str | None
    model: str | None = None
    workers: int | None = None
    prefill_workers: int | None = None
    disagg: bool = False
    planner: bool = False
    frontends: int | None = None
    auto_parsers: bool = True
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()
    namespace: str | None = None
    nats_url: str | None = None
    nats_ca: Path | None = None
    bus_host: str | None = None
    cpu_slots: int | None = None
    forkserver: bool = True
    endpoints: tuple[EndpointSpec, ...] = ()
    forget: bool = False
    environment: str = LOCAL
    cluster_address: str | None = None
    kv_network: str | None = None
    kv_stream: bool = False

    @property
    def of_endpoints(self) -> bool:
        """Whether endpoints are all that is served."""
        return self.graph == OF_ENDPOINTS

    @property
    def clustered(self) -> bool:
        """Whether workers live on the nodes of a cluster."""
        return self.environment != LOCAL

    @property
    def kv_flags(self) -> tuple[Flag, ...]:
        """How KV crosses machines, for the workers of the graph and of endpoints."""
        given = {KV_NETWORK: self.kv_network, KV_STREAM: "true" if self.kv_stream else None}
        texts = ((key, text) for key, text in given.items() if text is not None)
        return tuple(Flag((key,), text, f"--{key}", key, engines_only=True) for key, text in texts)

    def check(self, environ: Mapping[str, str]) -> None:
        """Raise UsageError or ConfigError for what cannot be asked for: processes would only fail."""
        check_variables(environ, REFUSED_VARIABLES)
        for spec in self.endpoints:
            try:
                check_settings(spec)
            except UsageError as error:
                raise ConfigError(f"endpoint {spec.name}: {error.cause}", error.remedy) from error
        if self.kv_network and self.kv_stream:
            raise UsageError("--kv-network and --kv-stream exclude each other", "KV crosses machines in one way")
        check_kv_network(self.kv_network, here=not self.clustered)
        self._check_options()

    def for_graph(self) -> GraphRequest:
        """The graph to start. Raises GraphError if it cannot be had."""
        target = self.graph or (DISAGGREGATED if self.disagg or self.prefill_workers else AGGREGATED)
        counts = ((_FRONTENDS, self.frontends), (_WORKERS, self.workers), (_PREFILL_WORKERS, self.prefill_workers))
        options = (f"--{service}.ServiceArgs.workers={count}" for service, count in counts if count is not None)
        # Where endpoints are all that is served, how KV crosses machines is for their workers alone.
        flags = self.flags if self.of_endpoints else (*self.flags, *self.kv_flags)
        overrides = (*options, *self.overrides)
        return GraphRequest(
            load_graph(target), self.model, flags, overrides, self.config, self.namespace, self.forkserver
        )

    def _check_options(self) -> None:
        """Raise UsageError for options of a model, where a graph or endpoints alone are served."""
        if self.graph is None:
            return
        workers = "--{}.ServiceArgs.workers=N".format
        for option, given, for_graph, for_endpoints in (
            ("--workers", self.workers is not None, workers(_WORKERS), "min_workers"),
            ("--prefill-workers", self.prefill_workers is not None, workers(_PREFILL_WORKERS), "min_prefill_workers"),
            ("--disagg", self.disagg, "examples.llm.graphs.disagg:Frontend as the graph", "disaggregated"),
            ("--planner", self.planner, "--Planner.no-operation=false", ""),
            ("--frontends", self.frontends is not None, workers(_FRONTENDS), ""),
        ):
            if given and not self.of_endpoints:
                raise UsageError(f"{option} goes with a model, and {self.graph} is a graph", f"write {for_graph}")
            if given and for_endpoints:
                raise UsageError(
                    f"{option} goes with a model, and none is named", f"set {for_endpoints} of each endpoint"
                )


def request_of_endpoint(
    spec: EndpointSpec, namespace: str | None = None, flags: tuple[Flag, ...] = (), *, forks: bool = True
) -> GraphRequest:
    """The graph of an endpoint's revision. `flags`: for the workers of all endpoints, unless this one has its own.
    Raises UsageError for arguments that no service takes."""
    _check_no_server_settings(spec)
    flags = (*(flag for flag in flags if not _goes_before(spec, flag)), *_flags(spec))
    graph = load_graph(DISAGGREGATED if spec.disaggregated else AGGREGATED)
    return GraphRequest(graph, spec.model, flags, tuple(_overrides(spec)), namespace=namespace, forks=forks)


def check_settings(spec: EndpointSpec) -> None:
    """Raise UsageError for arguments that no service takes, or with values that are none. Looks at no model."""
    if spec.adapter_of is None:
        request_of_endpoint(spec).resolve()
    else:
        _check_no_server_settings(spec)


def _check_no_server_settings(spec: EndpointSpec) -> None:
    """Raise UsageError for arguments of the one HTTP server, which an endpoint of its own would not change."""
    for name in map(canonical, chain(spec.args, *_sections(spec))):
        if name in OF_SERVER:
            what = f"args.{name} is about the HTTP server, which is the same for all models"
            raise UsageError(what, f"give it to the server: `dynamo serve ... --Frontend.{name}=VALUE`")


def _flags(spec: EndpointSpec) -> Iterator[Flag]:
    """The arguments that name no service."""
    yield flag_of(SERVED_NAME, _text(list(served_names(spec))), "name")
    for key, value in settings_of(spec).items():
        if key in every_argument() and key != SERVED_NAME:
            yield flag_of(key, _text(value), f"args.{key}")
        elif key != SERVED_NAME and not _is_section(key, value):
            yield Flag((key,), _text(value), f"args.{key}", beside=key)
    if spec.engine == "vllm" and _is_whole(spec.gpu) and not any(key in spec.args for key in _SIZES):
        yield flag_of(_TENSOR_PARALLEL, f"{spec.gpu:g}", "gpu")


def _overrides(spec: EndpointSpec) -> Iterator[str]:
    """The options of single services: those that the endpoint's fields stand for, then those of its arguments."""
    counts = {_WORKERS: spec.least_awake} | ({_PREFILL_WORKERS: spec.min_prefill_workers} if spec.disaggregated else {})
    for service, count in counts.items():
        yield f"--{service}.engine={spec.engine}"
        yield f"--{service}.ServiceArgs.workers={count}"
        if spec.gpu is not None and (spec.engine == "mocker" or not _is_whole(spec.gpu)):
            yield f"--{service}.ServiceArgs.resources.gpu={spec.gpu:g}"
    for key, value in spec.args.items():
        if _is_section(key, value):
            yield from (f"--{key}.{name}={_text(item)}" for name, item in value.items())


def _goes_before(spec: EndpointSpec, flag: Flag) -> bool:
    """Whether the endpoint has its own in the place of an option of the server. KV crosses machines in one way: one
    that chooses the other way does without the server's."""
    key, others = flag.path[0], {KV_NETWORK: KV_STREAM, KV_STREAM: KV_NETWORK}
    return key in spec.args or any(own.get(others.get(key, "")) for own in (spec.args, *_sections(spec)))


def _sections(spec: EndpointSpec) -> Iterator[Mapping[str, Any]]:
    return (value for name, value in spec.args.items() if _is_section(name, value))


def _is_section(key: str, value: Any) -> bool:
    """Whether the argument holds settings of one service, by the service's name."""
    return key[0].isupper() and isinstance(value, Mapping)


def _is_whole(gpu: float | None) -> bool:
    return gpu is not None and gpu >= 1


def _text(value: Any) -> str:
    """A value as options spell it."""
    if isinstance(value, str):
        return f'"{value}"' if value in ("null", "~") else value
    return msgspec.json.encode(value).decode()
