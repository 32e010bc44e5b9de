"""Our metrics beside vLLM's, under the frontend's /metrics."""

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
    """Reads the values when it is asked, so that keeping them costs nothing."""

    def __init__(self, read: Read, histograms: Mapping[Metric, Histogram]) -> None:
        self._read = read
        self._histograms = histograms

    def describe(self) -> list[Family]:
        """Nothing: the registry would otherwise read all values to learn their names."""
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
    """Have /metrics show what `read` gives, and the histograms. `read` is called in the thread that serves."""
    registry.register(_Reader(read, histograms or {}))
