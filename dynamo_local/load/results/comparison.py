"""Compares the figures of two runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo_local.load.results.figures import Figures
from dynamo_local.load.results.file import Run
from dynamo_local.load.results.quantiles import SHARES, Interval, quantile, ratio_of_quantiles
from dynamo_local.load.results.records import Record
from dynamo_local.load.results.report import MEASURES, aligned, milliseconds

_PER_REQUEST: dict[str, Callable[[Record], float | None]] = {
    "ttft_s": lambda record: record.ttft_s,
    "itl_s": lambda record: record.itl_s,
    "e2e_s": lambda record: record.e2e_s,
}
"""Latencies with one value for each request. These can be resampled; gaps within an answer depend on each other."""

_RATES = {
    "completed_per_s": "requests completed/s",
    "output_tokens_per_s": "output tokens/s",
    "input_tokens_per_s": "input tokens/s",
}


class Row(msgspec.Struct, frozen=True):
    """A figure of both runs. Latencies are in seconds."""

    figure: str
    first: float | None
    second: float | None
    ratio: float | None
    """Ratio of the second to the first; None if one is missing or the first is 0."""
    interval: Interval | None = None


class Comparison(msgspec.Struct, frozen=True):
    rows: list[Row]
    differing: dict[str, tuple[Any, Any]]
    """Settings in which the runs differ, and which may explain different figures."""


def compare(first: Run, second: Run, draw: random.Random) -> Comparison:
    """Compare quantiles of latencies, rates, and goodput. `draw` drives the bootstrap."""
    rows = [_row(label, getattr(first.figures, name), getattr(second.figures, name)) for name, label in _RATES.items()]
    rows.append(_row("failed requests", first.figures.failed, second.figures.failed))
    rows.append(_row("goodput, share", *(_goodput(run.figures) for run in (first, second))))
    for name in _PER_REQUEST:
        rows += _quantiles(name, _values(first, name), _values(second, name), draw)
    for share_name, share in SHARES.items():
        gaps = [_gap_quantile(run, share) for run in (first, second)]
        rows.append(_row(f"{MEASURES['gap_s']}, {share_name}", *gaps))
    names = sorted({*first.settings, *second.settings} - {"load"})
    pairs = {name: (first.settings.get(name), second.settings.get(name)) for name in names}
    return Comparison(rows, {name: pair for name, pair in pairs.items() if pair[0] != pair[1]})


def as_text(comparison: Comparison) -> str:
    """Return the comparison as a table, with latencies in milliseconds."""
    cells = [_cells(row) for row in comparison.rows if row.first is not None or row.second is not None]
    lines = [aligned([["", "A", "B", "B / A", "95 % interval"], *cells])]
    if comparison.differing:
        lines.append("")
        lines += [f"differing: {name}: {a!r} | {b!r}" for name, (a, b) in comparison.differing.items()]
    return "\n".join(lines)


def _values(run: Run, name: str) -> list[float]:
    measure = _PER_REQUEST[name]
    return [value for record in _counted(run) if (value := measure(record)) is not None]


def _counted(run: Run) -> list[Record]:
    return [record for record in run.requests if record.is_completed and record.at_s >= run.warmup_s]


def _quantiles(name: str, first: Sequence[float], second: Sequence[float], draw: random.Random) -> list[Row]:
    rows = []
    for share_name, share in SHARES.items():
        values = [quantile(sorted(values), share) if values else None for values in (first, second)]
        interval = ratio_of_quantiles(first, second, share, draw)
        rows.append(_row(f"{MEASURES[name]}, {share_name}", *values, interval=interval))
    return rows


def _gap_quantile(run: Run, share: float) -> float | None:
    gaps = run.figures.gap_s
    named = {value: name for name, value in SHARES.items()}[share]
    return None if gaps is None else float(getattr(gaps, named))


def _goodput(figures: Figures) -> float | None:
    return None if figures.goodput is None else figures.goodput.share


def _row(figure: str, first: float | None, second: float | None, *, interval: Interval | None = None) -> Row:
    ratio = second / first if first and second is not None else None
    return Row(figure, first, second, ratio, interval)


def _cells(row: Row) -> list[str]:
    is_latency = any(row.figure.startswith(label) for label in MEASURES.values())

    def shown(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{milliseconds(value)} ms" if is_latency else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"

    interval = "" if row.interval is None else f"{row.interval.low:.2f} to {row.interval.high:.2f}"
    return [row.figure, shown(row.first), shown(row.second), "-" if row.ratio is None else f"{row.ratio:.2f}", interval]
