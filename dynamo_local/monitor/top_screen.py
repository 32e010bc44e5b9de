"""Draws `dynamo top`: on a full screen that is refreshed, or once as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynamo_local.core.messages.planner import PlannerReport
from dynamo_local.core.messages.presence import MigrationCounts
from dynamo_local.monitor.scraping import FrontendFigures
from dynamo_local.monitor.top_view import ProcessRow, TopView, WorkerRow

Draw = Callable[[TopView], None]

_BAR = 8
_NAME, _DETAIL = 16, 14
"""Widths of these columns, so that a line fits into 80 columns."""
_DECISIONS = 5
_UNKNOWN = "-"
_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "revoked": "yellow", "failed": "red"}


@contextmanager
def live_screen() -> Iterator[Draw]:
    """Open a screen that is redrawn in place, and restore the terminal afterwards."""
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda view: live.update(drawn(view, ascii_only=console.options.ascii_only), refresh=True)


def print_once(view: TopView) -> None:
    """Print the view to standard output, in colour only on a terminal."""
    console = Console(highlight=False)
    console.print(drawn(view, ascii_only=console.options.ascii_only))


def drawn(view: TopView, *, ascii_only: bool = False) -> RenderableType:
    """Return the view as a drawing that fits into 80 columns."""
    parts: list[RenderableType] = [_head(view)]
    if view.workers:
        parts += ["", _workers(view, ascii_only)]
    if view.processes:
        parts += ["", _processes(view)]
    if view.planner is not None:
        parts += ["", *_planner(view.planner)]
    return Group(*parts)


def _head(view: TopView) -> Text:
    parts = [view.namespace]
    if view.frontend is not None:
        parts += _figures(view.frontend)
    head = Text("  ".join(parts), style="bold")
    if view.queue is not None:
        head.append(f"\nprefill queue: {view.queue.waiting} waiting, {view.queue.in_hand} in hand")
    if view.migrations is not None:
        head.append(f"\n{_migrations(view.migrations)}")
    return head


def _migrations(counts: MigrationCounts) -> str:
    words = f"migrations: {counts.completed} done, {counts.not_completed} not"
    if counts.gap_s is None:
        return words
    steps = "" if counts.gap_steps is None else f" ({counts.gap_steps:.1f} steps)"
    return f"{words}, last gap {_seconds(counts.gap_s)}{steps}"


def _figures(figures: FrontendFigures) -> list[str]:
    return [
        f"{_number(figures.in_flight)} in flight",
        f"{_number(figures.requests_per_s, '.1f')} req/s",
        f"TTFT {_seconds(figures.ttft_s)}",
        f"ITL {_seconds(figures.inter_token_s)}",
    ]


def _workers(view: TopView, ascii_only: bool) -> Table:
    table = _table(("WATCHER", "ROLE", "STATE"), ("RUN", "WAIT"), ("KV",), ("TOK/S", "AGE"))
    for row in view.workers:
        table.add_row(
            _short(row.watcher, view),
            row.role,
            _state(row.state),
            _number(row.running),
            _number(row.waiting),
            _kv(row, ascii_only),
            _number(row.tokens_per_s, ".0f"),
            _age(row.age_s),
        )
    return table


def _processes(view: TopView) -> Table:
    table = _table(("WATCHER", "ROLE", "STATE", ""), ("AGE",))
    for row in view.processes:
        table.add_row(*_process(row, view))
    return table


def _process(row: ProcessRow, view: TopView) -> tuple[str | Text, ...]:
    return _short(row.watcher, view), row.role, _state(row.state), row.detail, _age(row.age_s)


def _planner(report: PlannerReport) -> list[RenderableType]:
    devices = f"{_number(report.devices)} of {report.max_devices} devices"
    words = [f"planner {report.policy}", devices, report.changing or ("" if report.acts else "only observes")]
    parts: list[RenderableType] = [Text("  ".join(filter(None, words)), style="bold")]
    decisions = Table.grid(padding=(0, 2))
    for decision in reversed(report.decisions[-_DECISIONS:]):
        what = Text(decision.text)
        for outcome in decision.outcomes:
            what.append(f"\n{outcome}", style="dim")
        decisions.add_row(f"{datetime.fromtimestamp(decision.time).astimezone():%H:%M:%S}", what)
    return [*parts, decisions] if decisions.row_count else parts


def _table(*groups: tuple[str, ...]) -> Table:
    """Return a table whose groups of headers are, alternately, of text (left) and of numbers (right)."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, group in enumerate(groups):
        for header in group:
            table.add_column(header, justify="right" if index % 2 else "left", no_wrap=True, overflow="ellipsis")
    return table


def _short(watcher: str, view: TopView) -> str:
    return _cut(watcher.removeprefix(f"{view.namespace}_"), _NAME)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 2]}.."


def _state(state: str) -> Text:
    return Text(state, style=_STYLES.get(state, ""))


def _kv(row: WorkerRow, ascii_only: bool) -> Text:
    if row.kv_usage is None:
        return Text(_cut(row.detail, _DETAIL) or _UNKNOWN, style="dim")
    full = round(min(max(row.kv_usage, 0.0), 1.0) * _BAR)
    used, free = ("#", ".") if ascii_only else ("█", "░")
    return Text(f"{used * full}{free * (_BAR - full)} {row.kv_usage:4.0%}")


def _number(value: float | None, form: str = "d") -> str:
    return _UNKNOWN if value is None else format(value, form)


def _seconds(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _age(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if value >= size:
            return f"{value / size:.0f}{unit}"
    return f"{value:.0f}s"
