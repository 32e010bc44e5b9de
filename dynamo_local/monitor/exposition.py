"""Adds the metrics of dynamo-local to vLLM's own, and writes them as /metrics shows them.

Between frontends they go as messages (core/messages/reports.py), in which Prometheus' client has no part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from dynamo_local.core.histogram import Histogram, added_up
from dynamo_local.core.messages.reports import MetricFamily, MetricKind, MetricSample
from dynamo_local.monitor.metrics import Distribution, Metric, Sample

Read = Callable[[], Iterable[Sample]]
ReadDistributions = Callable[[], Iterable[Distribution]]

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
"""Of what `written` returns."""


class _Reader(Collector):
    """A collector that reads the values at each scrape, so that nothing is updated between scrapes."""

    def __init__(self, read: Read, distributions: ReadDistributions) -> None:
        self._read = read
        self._distributions = distributions

    def describe(self) -> list[Family]:
        """Return nothing: otherwise the registry reads all values at registration to learn their names."""
        return []

    def collect(self) -> Iterator[Family]:
        yield from _values(self._read())
        yield from _histograms(self._distributions())


class _Written(Collector):
    """A collector of families that came as messages."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        for each in self._families:
            family = Family(each.name, each.help, each.kind)
            for sample in each.samples:
                family.add_sample(sample.name, dict(sample.labels), sample.value)
            yield family


def _values(samples: Iterable[Sample]) -> Iterator[Family]:
    by_metric: defaultdict[Metric, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_metric[sample.metric].append(sample)
    for metric, found in by_metric.items():
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=metric.labels)
        for sample in found:
            family.add_metric(sample.labels, sample.value)
        yield family


def _histograms(distributions: Iterable[Distribution]) -> Iterator[Family]:
    by_series: defaultdict[Metric, dict[tuple[str, ...], list[Histogram]]] = defaultdict(dict)
    for each in distributions:
        by_series[each.metric].setdefault(each.labels, []).append(each.histogram)
    for metric, series in by_series.items():
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, histograms in series.items():
            whole = added_up(histograms)
            family.add_metric(labels, whole.cumulative, whole.sum)
        yield family


def expose(read: Read, distributions: ReadDistributions = tuple, registry: CollectorRegistry = REGISTRY) -> None:
    """Add the samples of `read` and the histograms of `distributions` to /metrics. Both are called in the serving
    thread."""
    registry.register(_Reader(read, distributions))


def collected(registry: CollectorRegistry = REGISTRY) -> tuple[MetricFamily, ...]:
    """Return all that this process would show. To be called in the serving thread."""
    return tuple(_as_message(family) for family in registry.collect())


def families(samples: Iterable[Sample]) -> tuple[MetricFamily, ...]:
    """Return these samples by metric."""
    return tuple(_as_message(family) for family in _values(samples))


def written(families: Iterable[MetricFamily]) -> bytes:
    """Write metrics as Prometheus reads them."""
    return generate_latest(_Written(families))


def _as_message(family: Family) -> MetricFamily:
    samples = tuple(
        # What is true or false is a number only when it is written.
        MetricSample(sample.name, tuple(sorted(sample.labels.items())), float(sample.value))
        for sample in family.samples
    )
    return MetricFamily(family.name, cast("MetricKind", family.type), family.documentation, samples)
