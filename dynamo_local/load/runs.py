"""Runs of `dynamo load`: their file, their report, and the comparison of two."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.load.figures import SHARES, Figures, Interval, Record, Spread, quantile, ratio_of_quantiles

# The file of a run: settings, figures, and the record of every request, to recompute figures from.

FORMAT = 1


class Run(msgspec.Struct):
    """A run, as it is saved."""

    settings: dict[str, Any]
    """The given options and the seed: with them the same load can be sent again."""
    figures: Figures
    notes: list[str]
    """Sentences that qualify the figures."""
    warmup_s: float
    interrupted: bool
    client_cpu_share: float
    """Share of one core that the generator used, 0 to 1."""
    requests: list[Record]
    format: int = FORMAT


def encode(run: Run) -> bytes:
    """Encode a run as JSON. Times are rounded to microseconds."""
    return msgspec.json.encode(_rounded(msgspec.to_builtins(run))) + b"\n"


def read(path: Path) -> Run:
    """Read the file of a run. Raises UsageError."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not a file of `dynamo load --json`: {error}") from error
    if run.format != FORMAT:
        raise UsageError(f"{path} has format {run.format}, this version reads {FORMAT}")
    return run


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, 6)
        case list():
            return [_rounded(each) for each in value]
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
    return value


# The report of a run as text.

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
MEASURES = {
    "ttft_s": "time to first token",
    "itl_s": "inter-token latency",
    "gap_s": "gap between chunks",
    "e2e_s": "end to end",
    "lag_s": "schedule lag",
}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines with columns: the first aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def milliseconds(seconds: float) -> str:
    """Return the time in milliseconds, with at least three significant digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def report(run: Run) -> str:
    """Return the report of a run."""
    figures = run.figures
    parts = ["\n".join([*_head(run), "", *_counts(figures)]), _latencies(figures)]
    if figures.goodput is not None:
        parts.append(_goodput(figures))
    if figures.errors:
        parts.append(_errors(run))
    if run.notes:
        parts.append("\n".join(f"note: {note}" for note in run.notes))
    return "\n\n".join(parts)


def _head(run: Run) -> list[str]:
    settings = run.settings
    lines = [f"{settings['load']} at {settings['url']}, model {settings['model']}"]
    if run.interrupted:
        lines.append(f"Interrupted after {run.figures.wall_s + run.warmup_s:.1f} s.")
    return lines


def _counts(figures: Figures) -> list[str]:
    cut = f", {figures.cut_off} cut off" if figures.cut_off else ""
    offered = f"{figures.offered_per_s:.2f}/s offered, " if figures.arrivals_s else ""
    return [
        f"requests  {figures.planned}: {figures.completed} completed, {figures.failed} failed{cut}; "
        f"at most {figures.most_at_once} at once",
        f"rates     {offered}{figures.completed_per_s:.2f}/s completed in {figures.wall_s:.1f} s; "
        f"{figures.output_tokens_per_s:,.1f} output tokens/s, {figures.input_tokens_per_s:,.1f} input tokens/s",
    ]


def _latencies(figures: Figures) -> str:
    spreads: dict[str, Spread | None] = {name: getattr(figures, name) for name in MEASURES}
    rows = [
        [MEASURES[name], *(milliseconds(getattr(spread, column)) for column in _COLUMNS), str(spread.count)]
        for name, spread in spreads.items()
        if spread is not None
    ]
    return aligned([["milliseconds", *_COLUMNS, "of"], *rows]) if rows else "No request was sent."


def _goodput(figures: Figures) -> str:
    goodput = figures.goodput
    assert goodput is not None
    missed = ", ".join(f"{name} by {count}" for name, count in goodput.missed.items())
    return (
        f"goodput   {goodput.objective}: {goodput.share:.1%} of the requests, {goodput.per_s:.2f}/s"
        + (f"; missed {missed}" if missed else "")
        + (f"; {figures.failed} failed" if figures.failed else "")
    )


def _errors(run: Run) -> str:
    """Return the kinds of errors, each with its number and an example."""
    examples = {record.error: record.detail for record in reversed(run.requests)}
    return "\n".join(f"failed    {count} {kind}: {examples[kind]}" for kind, count in run.figures.errors.items())


# Compares the figures of two runs.

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
    rows.append(_row("goodput, share", *(_good_share(run.figures) for run in (first, second))))
    for name in _PER_REQUEST:
        rows += _quantiles(name, _latencies_of(first, name), _latencies_of(second, name), draw)
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


def _latencies_of(run: Run, name: str) -> list[float]:
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


def _good_share(figures: Figures) -> float | None:
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
