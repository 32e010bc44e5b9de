"""The report of a run as text."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.load.results.figures import Figures
from dynamo_local.load.results.file import Run
from dynamo_local.load.results.quantiles import Spread

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
