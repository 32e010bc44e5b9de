"""This project's own counters beside vLLM's, under /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Counts = Callable[[], Mapping[str, int]]
"""How often what has happened, so far in the life of the process."""


class _Collector:
    """Reads the counts when it is asked, so that counting costs nothing."""

    def __init__(self, name: str, documentation: str, label: str, counts: Counts) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._counts = counts

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(self._name, self._documentation, labels=[self._label])
        for value, count in sorted(self._counts().items()):
            family.add_metric([value], count)
        return [family]


def expose(name: str, documentation: str, label: str, counts: Counts) -> None:
    """Add a counter to what /metrics shows, one series for each key of `counts()`. Call once for a name."""
    from prometheus_client import REGISTRY

    REGISTRY.register(_Collector(name, documentation, label, counts))
