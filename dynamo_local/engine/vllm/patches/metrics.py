"""vLLM's metrics of several models in one process.

vLLM keeps the metrics of one AsyncLLM in the process's registry, and removes them when another one is made. Here each
model has a registry of its own, and one collector shows all of them: each family once, with the samples of all models.

Two more kinds are the process's, and stay so. Calls of tool parsers are counted under the name of the model that was
built last; here under that of the model whose application answers. HTTP requests are counted by the first application
alone, since the others find the names taken; here all applications count in the same metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_fastapi_instrumentator import metrics as http_metrics
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from vllm.parser import metrics as parser_metrics
from vllm.v1.metrics.loggers import PrometheusStatLogger

from dynamo_local.engine.vllm.patches.table import applies

answering: ContextVar[str] = ContextVar("answering", default="")
"""Name of the model whose application answers the request in this context."""

_CREATED = "_created"


class ModelMetrics(Collector):
    """Shows the metrics of all models: each family once.

    Two revisions of one model may have equal series. Counters and histograms are added up then, and of gauges the
    newer model's are shown.
    """

    def __init__(self) -> None:
        self._registries: list[CollectorRegistry] = []

    def add(self) -> CollectorRegistry:
        """Return a registry for one more model."""
        registry = CollectorRegistry()
        self._registries = [*self._registries, registry]
        return registry

    def remove(self, registry: CollectorRegistry) -> None:
        """Show the model's metrics no more."""
        self._registries = [known for known in self._registries if known is not registry]

    def describe(self) -> list[Metric]:
        """Return nothing: otherwise the registry collects once to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples.extend(family.samples)
        for family in families.values():
            family.samples = _merged(family)
            yield family


def _merged(family: Metric) -> list[Sample]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in family.samples:
        key = sample.name, tuple(sorted(sample.labels.items()))
        earlier = found.get(key)
        found[key] = sample if earlier is None else sample._replace(value=_together(family.type, earlier, sample))
    return list(found.values())


def _together(kind: str, earlier: Sample, later: Sample) -> float:
    if later.name.endswith(_CREATED):
        return min(earlier.value, later.value)
    return later.value if kind == "gauge" else earlier.value + later.value


@cache
def model_metrics() -> ModelMetrics:
    """Return the process's collector, which /metrics shows."""
    metrics = ModelMetrics()
    REGISTRY.register(metrics)
    return metrics


def stat_logger(registry: CollectorRegistry) -> type[PrometheusStatLogger]:
    """Return a class of vLLM's logger for Prometheus whose metrics are in this registry."""
    kinds: dict[str, Any] = {
        name: staticmethod(partial(kind, registry=registry))
        for name, kind in (("_gauge_cls", Gauge), ("_counter_cls", Counter), ("_histogram_cls", Histogram))
    }
    parts = {
        name: type(name, (getattr(PrometheusStatLogger, name),), kinds)
        for name in ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls")
    }
    return type("ModelStatLogger", (PrometheusStatLogger,), {**kinds, **parts})


def count_tool_calls_by_model() -> None:
    """Have calls of tool parsers counted for the model that answers. A second call changes nothing."""
    if applies("metrics of tool parsers"):
        parser_metrics.init_parser_metrics = _init_parser_metrics


def _init_parser_metrics(*, model_name: str) -> None:
    """Stand in for vLLM's own: make the counter once, and the series of each model."""
    counter = _tool_calls()
    parser_metrics._tool_call_parser_invocations = counter
    parser_metrics._model_name = _Answering()  # type: ignore[assignment]
    for mode in ("streaming", "non_streaming"):
        for outcome in parser_metrics.ToolCallOutcome:
            for kind in parser_metrics.RequestType:
                counter.labels(model_name, mode, outcome.value, kind.value)


@cache
def _tool_calls() -> Counter:
    return Counter(
        parser_metrics._TOOL_CALL_PARSER_INVOCATIONS_TOTAL,
        "Calls of tool parsers: when streaming one for each delta, otherwise one for each choice.",
        ["model_name", "mode", "outcome", "request_type"],
        # Not the process's registry, from which each new AsyncLLM removes what is vLLM's.
        registry=model_metrics().add(),
    )


class _Answering:
    """A label whose text is the name of the model that answers."""

    def __str__(self) -> str:
        return answering.get()


@cache
def http_counters() -> Any:
    """Return what counts a HTTP request in the process's metrics. Call before the first application is built, which
    would take their names."""
    return http_metrics.default(registry=REGISTRY)


def count_http_together(app: Any) -> None:
    """Have an application count its HTTP requests in the metrics that all applications share."""
    if not applies("metrics of HTTP"):
        return
    for layer in app.user_middleware:
        if layer.cls is PrometheusInstrumentatorMiddleware and layer.kwargs["registry"] is REGISTRY:
            layer.kwargs["instrumentations"] = [http_counters()]
    # Built anew at the first request.
    app.middleware_stack = None
