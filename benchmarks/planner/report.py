"""Arms under the same swinging load, side by side, and each against the planner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from benchmarks.harness.report import Figures, milliseconds, table
from benchmarks.harness.spread import Interval, bootstrap, quantile
from benchmarks.planner.cycles import Cycle, Limits, Outing, cycles_of, together

Paired = Mapping[tuple[int, int], Cycle]
"""Cycles of an arm by seed and number: in every arm, the same two have the same requests."""

_HEADERS = (
    "arm",
    "devices",
    "device-seconds a cycle",
    "good",
    "TTFT kept",
    "ITL kept",
    "TTFT s mean",
    "p50",
    "p95",
    "ITL ms p50",
    "p95",
    "whole answer, mean s",
    "tokens/s",
    "good/device-hour",
    "changes a cycle",
    "failed",
)


def report(outings: Sequence[Outing], limits: Limits) -> Figures:
    """Print the tables."""
    arms: dict[str, dict[tuple[int, int], Cycle]] = {}
    for outing in outings:
        for number, cycle in enumerate(cycles_of(outing, limits)):
            arms.setdefault(outing.label, {})[outing.seed, number] = cycle
    rows = [
        _row(label, list(paired.values()), [each for each in outings if each.label == label])
        for label, paired in arms.items()
    ]
    table(_title(outings, limits), _HEADERS, rows)
    planned = dict.fromkeys(outing.label for outing in outings if outing.arm.startswith("planner"))
    ratios = {label: against(arms[label], arms) for label in planned}
    for label, others in ratios.items():
        _ratio_table(label, others)
    return {
        "limits": msgspec.to_builtins(limits),
        "ratios": {
            label: {other: {name: vars(value) for name, value in each.items()} for other, each in others.items()}
            for label, others in ratios.items()
        },
        "runs": msgspec.to_builtins(list(outings)),
    }


def told(outing: Outing, limits: Limits) -> str:
    """Renders a run as a line."""
    cycle = together(cycles_of(outing, limits))
    return (
        f"{outing.label}, seed {outing.seed}: {cycle.good} of {len(cycle.answers)} good, {cycle.devices:.2f} devices, "
        f"{len(outing.changes)} changes, {cycle.failed} failed; the machine had {outing.busy_cores:.2f} cores busy"
    )


_RATIOS: Mapping[str, Callable[[Cycle, Cycle], float]] = {
    "good requests": lambda mine, other: mine.good / max(other.good, 1),
    "devices": lambda mine, other: mine.devices / other.devices,
    "good per device-hour": lambda mine, other: mine.good_per_device_hour / max(other.good_per_device_hour, 1e-9),
    "TTFT, times faster": lambda mine, other: _mean(other.ttfts_s) / _mean(mine.ttfts_s),
    "TTFT p95, times faster": lambda mine, other: _quantile(other.ttfts_s, 0.95) / _quantile(mine.ttfts_s, 0.95),
    "whole answer, times faster": lambda mine, other: _mean(other.e2es_s) / _mean(mine.e2es_s),
}
"""Planner against another arm, cycle by cycle."""


def against(mine: Paired, arms: Mapping[str, Paired]) -> dict[str, dict[str, Interval]]:
    """By arm, the ratios of the cycles that it has in common with `mine`."""
    found = {}
    for label, theirs in arms.items():
        common = sorted(mine.keys() & theirs.keys())
        if theirs is not mine and common:
            found[label] = {
                name: bootstrap([ratio(mine[key], theirs[key]) for key in common]) for name, ratio in _RATIOS.items()
            }
    return found


def _title(outings: Sequence[Outing], limits: Limits) -> str:
    swing = outings[0].swing
    seeds = ", ".join(str(seed) for seed in sorted({outing.seed for outing in outings}))
    return (
        f"{swing.low:g} to {swing.high:g} requests/s in {swing.period_s:g} s; good: TTFT <= {limits.ttft_s:g} s and "
        f"ITL <= {limits.itl_s * 1e3:g} ms; seeds {seeds}"
    )


def _row(label: str, cycles: Sequence[Cycle], outings: Sequence[Outing]) -> list[str]:
    whole = together(cycles)
    sent = max(len(whole.answers), 1)
    return [
        label,
        f"{whole.devices:.2f}",
        f"{whole.device_s / len(cycles):.0f}",
        *(f"{100 * kept / sent:.1f} %" for kept in (whole.good, whole.first_in_time, whole.steady)),
        f"{_mean(whole.ttfts_s):.2f}",
        *(f"{_quantile(whole.ttfts_s, share):.2f}" for share in (0.5, 0.95)),
        *(milliseconds(_quantile(whole.itls_s, share)) for share in (0.5, 0.95)),
        f"{_mean(whole.e2es_s):.2f}",
        f"{whole.tokens / whole.seconds:.0f}",
        f"{whole.good_per_device_hour:.0f}",
        f"{sum(_counted_changes(outing) for outing in outings) / len(cycles):.1f}",
        str(whole.failed),
    ]


def _counted_changes(outing: Outing) -> int:
    return sum(change.done and change.at_s < outing.swing.seconds for change in outing.changes)


def _ratio_table(label: str, others: Mapping[str, Mapping[str, Interval]]) -> None:
    rows = [[other, *(interval.shown() for interval in each.values())] for other, each in others.items()]
    table(f"{label} against the others, medians over the cycles [95 %]", ("against", *_RATIOS), rows)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _quantile(values: Sequence[float], share: float) -> float:
    return quantile(values, share) if values else math.nan
