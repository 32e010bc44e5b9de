"""Adds the metrics of dynamo-local to vLLM's own under the frontend's /metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from dynamo_local.core.histogram import Histogram
from dynamo_local.monitor.metrics import Metric, Sample

Read = Callable[[], Iterable[Sample]]


class _Reader(Collector):
    """A collector that reads the values at each scrape, so that nothing is updated between scrapes."""

    def __init__(self, read: Read, histograms: Mapping[Metric, Histogram]) -> None:
        self._read = read
        self._histograms = histograms

    def describe(self) -> list[Family]:
        """Return nothing: otherwise the registry reads all values at registration to learn their names."""
        return []

    def collect(self) -> Iterator[Family]:
        by_metric: defaultdict[Metric, list[Sample]] = defaultdict(list)
        for sample in self._read():
            by_metric[sample.metric].append(sample)
        for metric, found in by_metric.items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for sample in found:
                family.add_metric(sample.labels, sample.value)
            yield family
        for metric, histogram in self._histograms.items():
            distribution = HistogramMetricFamily(metric.name, metric.help)
            distribution.add_metric([], histogram.cumulative, histogram.sum)
            yield distribution


def expose(
    read: Read, histograms: Mapping[Metric, Histogram] | None = None, registry: CollectorRegistry = REGISTRY
) -> None:
    """Add the samples of `read` and the histograms to /metrics. `read` is called in the serving thread."""
    registry.register(_Reader(read, histograms or {}))
