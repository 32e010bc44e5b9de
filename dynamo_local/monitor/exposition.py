"""Adds the metrics of dynamo-local to vLLM's own under the frontend's /metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from dynamo_local.core.histogram import Histogram, added_up
from dynamo_local.monitor.families import Metric
from dynamo_local.monitor.metrics import Distribution, Sample

Read = Callable[[], Iterable[Sample]]
ReadDistributions = Callable[[], Iterable[Distribution]]


class _Reader(Collector):
    """A collector that reads the values at each scrape, so that nothing is updated between scrapes."""

    def __init__(self, read: Read, distributions: ReadDistributions) -> None:
        self._read = read
        self._distributions = distributions

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
        yield from _histograms(self._distributions())


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
