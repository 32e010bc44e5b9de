"""The metrics of all frontends of a server, from the metrics of each. Pure.

Counters and histograms are added up, gauges by rule. What a frontend has counted is not taken back when it ends, or
does not answer: its last counters stay in the sum. Each frontend keeps them, by lease, and tells them to the others; of
what two of them know of a third, the larger value is the later one. So all show the same sum, which falls only if
nobody is left who knows a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dynamo_local.core.messages.reports import Labels, MetricFamily, MetricSample, MetricShare

Across = Literal["sum", "max", "own"]
"""What becomes of one series of several frontends. `own`: the value of the frontend that answers, if it has one."""

Rule = Callable[[MetricFamily], Across]

MOST_ENDED = 16
"""Frontends that have ended and whose counters are kept."""

_CREATED = "_created"
_COUNTING = frozenset({"counter", "histogram", "summary"})

_Series = tuple[str, Labels]


def together(families: Iterable[tuple[MetricFamily, ...]], rule: Rule) -> tuple[MetricFamily, ...]:
    """Return the metrics of all frontends, of which the first is the one that answers. Each family comes once."""
    merged: dict[str, _Merged] = {}
    for share in families:
        for family in share:
            known = merged.get(family.name)
            if known is None:
                known = merged[family.name] = _Merged(family, rule(family))
            known.take(family)
    return tuple(each.family() for each in merged.values())


@dataclass
class _Merged:
    """One family, as far as it has been put together."""

    first: MetricFamily
    across: Across
    samples: dict[_Series, MetricSample] = field(default_factory=dict)

    def take(self, family: MetricFamily) -> None:
        for sample in family.samples:
            earlier = self.samples.get(sample.series)
            self.samples[sample.series] = sample if earlier is None else self._both(earlier, sample)

    def family(self) -> MetricFamily:
        return MetricFamily(self.first.name, self.first.kind, self.first.help, tuple(self.samples.values()))

    def _both(self, earlier: MetricSample, later: MetricSample) -> MetricSample:
        if earlier.name.endswith(_CREATED) and self.first.kind in _COUNTING:
            return min(earlier, later, key=lambda sample: sample.value)
        if self.across == "sum":
            return MetricSample(earlier.name, earlier.labels, earlier.value + later.value)
        return max(earlier, later, key=lambda sample: sample.value) if self.across == "max" else earlier


def counters(share: MetricShare, rule: Rule) -> MetricShare:
    """Return of a frontend's metrics what stays when it ends: what is added up and never falls. Zeros are left out."""
    return MetricShare(_counted(share.families, rule), _counted(share.by_key, rule))


def later(one: MetricShare, other: MetricShare) -> MetricShare:
    """Return the later counters of what is known twice of one frontend: of each series the larger value."""
    return MetricShare(
        together((one.families, other.families), lambda _: "max"),
        together((one.by_key, other.by_key), lambda _: "max"),
    )


def ended_together(
    known: Mapping[str, MetricShare], told: Mapping[str, MetricShare], living: Iterable[str]
) -> dict[str, MetricShare]:
    """Return what is known of frontends that have ended, with what another one tells of them. The last that became
    known are kept, at most `MOST_ENDED`. `living`: leases of those that have not ended."""
    found = dict(known)
    for lease, share in told.items():
        found[lease] = later(found[lease], share) if lease in found else share
    for lease in living:
        found.pop(lease, None)
    return dict(list(found.items())[-MOST_ENDED:])


def _counted(families: Iterable[MetricFamily], rule: Rule) -> tuple[MetricFamily, ...]:
    return tuple(
        MetricFamily(family.name, family.kind, family.help, samples)
        for family in families
        if family.kind in _COUNTING and rule(family) == "sum"
        if (samples := tuple(sample for sample in family.samples if sample.value))
    )
