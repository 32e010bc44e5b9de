"""Messages between frontends: the metrics of each, so that each can show those of all."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynamo_local.core.codec import Message

Kind = Literal["counter", "gauge", "histogram", "gaugehistogram", "summary", "info", "stateset", "unknown"]
"""The kinds of metrics that Prometheus' client has."""

Labels = tuple[tuple[str, str], ...]


class MetricSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One value. `name` has the suffixes of Prometheus' text, such as `_bucket`. `labels` are sorted."""

    name: str
    labels: Labels
    value: float

    @property
    def series(self) -> tuple[str, Labels]:
        """What is the same for the same value in another process."""
        return self.name, self.labels


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """The values of one metric."""

    name: str
    kind: Kind
    help: str
    samples: tuple[MetricSample, ...]


class MetricShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metrics of one frontend. `by_key`: families of which administrators are shown other samples, for each API
    key."""

    families: tuple[MetricFamily, ...] = ()
    by_key: tuple[MetricFamily, ...] = ()


class MetricsQuestion(Message, frozen=True):
    """Question for the metrics of a frontend."""


class MetricsAnswer(Message, frozen=True, omit_defaults=True):
    """The metrics of a frontend, and by lease the counters that it knows of frontends that have ended."""

    own: MetricShare
    ended: dict[str, MetricShare] = msgspec.field(default_factory=dict)
