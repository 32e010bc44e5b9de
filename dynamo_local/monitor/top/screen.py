"""Draws `dynamo top`: on a full screen that is refreshed, or once as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynamo_local.core.messages.planner import DecisionReport, PlannerReport
from dynamo_local.core.messages.presence import MigrationCounts
from dynamo_local.core.names import short_watcher
from dynamo_local.monitor.scraping import FrontendFigures
from dynamo_local.monitor.top.columns import Column, lines_of, table_of, tables_of
from dynamo_local.monitor.top.sections import (
    STYLES,
    clock_of,
    heading_of,
    sections_of,
    shown_number,
    shown_seconds,
    unqualified,
)
from dynamo_local.monitor.top.view import EventRow, ProcessRow, RoutingRow, TopView, WorkerRow

Draw = Callable[[TopView], None]

_BAR = 8
_NAME, _DETAIL = 16, 14
"""Maximum widths of these cells: the table of workers then fits into 80 columns."""
_EVENT_NAME = 24
"""The same of an event's watcher, which has its endpoint before it."""
_DECISIONS = 5
_UNKNOWN = "-"


@contextmanager
def live_screen() -> Iterator[Draw]:
    """Open a screen that is redrawn in place, and restore the terminal afterwards."""
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda view: live.update(_drawn_on(console, view), refresh=True)


def print_once(view: TopView) -> None:
    """Print the view to standard output, in colour only on a terminal."""
    console = Console(highlight=False)
    console.print(_drawn_on(console, view))


def _drawn_on(console: Console, view: TopView) -> RenderableType:
    return drawn(view, console.width, ascii_only=console.options.ascii_only)


def drawn(view: TopView, width: int, *, ascii_only: bool = False) -> RenderableType:
    """Return the view as a drawing that fits into so many columns, without what has no room."""
    parts: list[RenderableType] = [_head(view, width)]
    if view.workers or view.endpoints:
        parts += ["", *_workers(view, width, ascii_only)]
    if view.processes:
        parts += ["", _processes(view, width)]
    if view.planner is not None:
        parts += ["", *_planner(view.planner, width)]
    if view.events:
        parts += ["", Text("events", style="bold"), _events(view.events)]
    return Group(*parts)


def _head(view: TopView, width: int) -> Text:
    parts = [view.namespace]
    if view.frontend is not None:
        parts += _figures(view.frontend)
    head = Text("\n".join(lines_of(parts, width)), style="bold")
    more = []
    if not view.connected:
        more.append("NATS connection lost; reconnecting")
    if view.queue is not None:
        more.append(f"prefill queue: {view.queue.waiting} waiting, {view.queue.in_hand} in hand")
    if view.routing is not None:
        more += lines_of(_routing(view.routing, view.frontend), width)
    if view.migrations is not None:
        more += lines_of(_migrations(view.migrations), width)
    return head.append("".join(f"\n{line}" for line in more))


def _routing(routing: RoutingRow, frontend: FrontendFigures | None) -> list[str]:
    words = [f"routing: {routing.policy}", f"{shown_number(routing.assigned_per_s, '.1f')} req/s"]
    if routing.cached_share is not None:
        words.append(f"{routing.cached_share:.0%} of tokens expected in caches")
    if frontend is not None and frontend.cached_share is not None:
        words.append(f"{frontend.cached_share:.0%} of prompts found there")
    if routing.pull_share:
        words.append(f"{routing.pull_share:.0%} to pull")
    return words


def _migrations(counts: MigrationCounts) -> list[str]:
    words = [f"migrations: {counts.completed} done, {counts.not_completed} not"]
    if counts.gap_s is not None:
        steps = "" if counts.gap_steps is None else f" ({counts.gap_steps:.1f} steps)"
        words.append(f"last gap {shown_seconds(counts.gap_s)}{steps}")
    return words


def _figures(figures: FrontendFigures) -> list[str]:
    return [
        f"{shown_number(figures.in_flight)} in flight",
        *([f"{figures.held} held"] if figures.held else []),
        f"{shown_number(figures.requests_per_s, '.1f')} req/s",
        f"TTFT {shown_seconds(figures.ttft_s)}",
        f"ITL {shown_seconds(figures.inter_token_s)}",
    ]


def _workers(view: TopView, width: int, ascii_only: bool) -> Iterator[RenderableType]:
    """The workers of the graph's own model, and those of each revision of an endpoint below its heading."""
    sections = sections_of(view)
    rows = [row for section in sections for row in section.workers]
    if not rows:
        yield from (heading_of(section, width) for section in sections)
        return
    columns = _worker_columns(rows, ascii_only)
    tables = tables_of(columns, width, [len(section.workers) for section in sections])
    for section, table in zip(sections, tables, strict=True):
        if section.revision:
            yield heading_of(section, width)
        if section.workers:
            yield table


def _worker_columns(rows: Sequence[WorkerRow], ascii_only: bool) -> list[Column]:
    return [
        Column("WATCHER", tuple(_cut(unqualified(row), _NAME) for row in rows)),
        Column("ROLE", tuple(row.role for row in rows), leaves=1),
        Column("STATE", tuple(_state(row.state) for row in rows), leaves=5),
        Column("RUN", tuple(shown_number(row.running) for row in rows), right=True),
        Column("WAIT", tuple(shown_number(row.waiting) for row in rows), right=True, leaves=4),
        Column("KV", tuple(_kv(row, ascii_only) for row in rows), leaves=2, narrow=tuple(map(_kv_share, rows))),
        Column("TOK/S", tuple(shown_number(row.tokens_per_s, ".0f") for row in rows), right=True, leaves=3),
        Column("AGE", tuple(_age(row.age_s) for row in rows), right=True, leaves=0),
    ]


def _processes(view: TopView, width: int) -> Table:
    rows: tuple[ProcessRow, ...] = view.processes
    columns = [
        Column("WATCHER", tuple(_name(row.watcher) for row in rows)),
        Column("ROLE", tuple(row.role for row in rows), leaves=1),
        Column("STATE", tuple(_state(row.state) for row in rows)),
        Column(
            "",
            tuple(row.detail for row in rows),
            leaves=2,
            narrow=tuple(_cut(row.detail, _NAME) for row in rows),
            then=3,
        ),
        Column("AGE", tuple(_age(row.age_s) for row in rows), right=True, leaves=0),
    ]
    return table_of(columns, width)


def _planner(report: PlannerReport, width: int) -> list[RenderableType]:
    words = [
        f"planner {report.policy}",
        f"{shown_number(report.devices, 'g')} of {report.max_devices} devices",
        "" if report.acts else "only observes",
        "" if report.changing is None else f"now: {report.changing}",
    ]
    heading = "\n".join(lines_of(filter(None, words), width))
    decisions = Table.grid(padding=(0, 2))
    for decision in reversed(report.decisions[-_DECISIONS:]):
        decisions.add_row(_clock(decision.time), _decision(decision))
    parts: list[RenderableType] = [Text(heading, style="bold")]
    return [*parts, decisions] if decisions.row_count else parts


def _decision(decision: DecisionReport) -> Text:
    text = Text(decision.text)
    if decision.times > 1:
        text.append(f", {decision.times} times since {_clock(decision.began)}", style="dim")
    for outcome in decision.outcomes:
        text.append(f"\n{outcome}", style="dim")
    return text


def _events(rows: tuple[EventRow, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in reversed(rows):
        what = Text(row.what)
        if row.times > 1:
            what.append(f", {row.times} times", style="dim")
        table.add_row(_clock(row.time), _cut(_who(row), _EVENT_NAME), what)
    return table


def _who(row: EventRow) -> str:
    return short_watcher(row.watcher) if row.watcher else row.endpoint or _UNKNOWN


def _clock(time: float) -> Text:
    return Text(clock_of(time), no_wrap=True)


def _name(watcher: str) -> str:
    return _cut(short_watcher(watcher), _NAME)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 2]}.."


def _state(state: str) -> Text:
    return Text(state, style=STYLES.get(state, ""))


def _kv(row: WorkerRow, ascii_only: bool) -> Text:
    if row.kv_usage is None:
        return Text(_cut(row.detail, _DETAIL) or _UNKNOWN, style="dim")
    full = round(min(max(row.kv_usage, 0.0), 1.0) * _BAR)
    used, free = ("#", ".") if ascii_only else ("█", "░")
    return Text(f"{used * full}{free * (_BAR - full)} {row.kv_usage:4.0%}")


def _kv_share(row: WorkerRow) -> Text:
    return Text(_UNKNOWN if row.kv_usage is None else f"{row.kv_usage:4.0%}")


def _age(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if value >= size:
            return f"{value / size:.0f}{unit}"
    return f"{value:.0f}s"
