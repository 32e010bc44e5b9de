"""Draws `dynamo top`: on a full screen that is refreshed, or once as text. Columns are left out, never cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.presence import MigrationCounts
from dynamo_local.core.messages.reports import DecisionReport, EndpointReport, PlannerReport
from dynamo_local.core.names import MAIN, endpoint_of, parse_revision, short_watcher
from dynamo_local.monitor.scraping import FrontendFigures
from dynamo_local.monitor.top import EndpointRow, EventRow, ProcessRow, RoutingRow, TopView, WorkerRow

_GAP = 2

UNKNOWN = "-"
STYLES = {
    **dict.fromkeys(
        ("starting", "draining", "revoked", "waiting", "fetching", "waking", "updating", "deleting"), "yellow"
    ),
    **dict.fromkeys(("parked", "asleep"), "blue"),
    "ready": "green",
    "failed": "red",
}
Draw = Callable[[TopView], None]
_BAR = 8
_NAME, _DETAIL = 16, 14
"""Maximum widths of these cells: the table of workers then fits into 80 columns."""
_EVENT_NAME = 24
"""The same of an event's watcher, which has its endpoint before it."""
_DECISIONS = 5
_UNKNOWN = "-"


@dataclass(frozen=True)
class Column:
    """A column. `right`: it has numbers. `leaves`: rank in the order in which columns are left out; None: it stays.
    `narrow`: its cells in a short form, which replaces them at that rank; the column is then left out at `then`."""

    header: str
    cells: tuple[str | Text, ...]
    right: bool = False
    leaves: int | None = None
    narrow: tuple[str | Text, ...] | None = None
    then: int | None = None

    @property
    def width(self) -> int:
        """Width of the widest cell, in character cells."""
        return max(map(_width, (self.header, *self.cells)))


def fitted(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """Return the columns that fit into the width: one after another is narrowed or left out, by its rank."""
    shown = list(columns)
    while _total(shown) > width:
        ranked = [column for column in shown if column.leaves is not None]
        if not ranked:
            break
        index = shown.index(min(ranked, key=lambda column: column.leaves or 0))
        column = shown[index]
        if column.narrow is not None:
            shown[index] = Column(column.header, column.narrow, right=column.right, leaves=column.then)
        else:
            del shown[index]
    return tuple(shown)


def table_of(columns: Sequence[Column], width: int) -> Table:
    """Return a table of the columns that fit into the width."""
    (table,) = tables_of(columns, width, [len(columns[0].cells)])
    return table


def tables_of(columns: Sequence[Column], width: int, sizes: Sequence[int]) -> list[Table]:
    """Return the columns that fit into the width as tables of so many rows each, one below the other: their columns are
    as wide, and the first of them with rows has the headers."""
    shown = fitted(columns, width)
    rows = iter(zip(*(column.cells for column in shown), strict=True))
    tables: list[Table] = []
    is_headed = False
    for size in sizes:
        tables.append(_table(shown, tuple(islice(rows, size)), has_header=size > 0 and not is_headed))
        is_headed = is_headed or size > 0
    return tables


def _table(columns: Sequence[Column], rows: Iterable[tuple[str | Text, ...]], *, has_header: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", show_header=has_header)
    for column in columns:
        justify = "right" if column.right else "left"
        table.add_column(
            column.header,
            justify=justify,  # type: ignore[arg-type]
            no_wrap=True,
            overflow="ellipsis",
            min_width=column.width,
        )
    for row in rows:
        table.add_row(*row)
    return table


def lines_of(parts: Iterable[str], width: int) -> list[str]:
    """Return the parts on as few lines as they need. A line breaks between parts only."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + _GAP + cell_len(part) <= width:
            lines[-1] += f"{' ' * _GAP}{part}"
        else:
            lines.append(part)
    return lines


def _total(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + _GAP * max(0, len(columns) - 1)


def _width(cell: str | Text) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)


@dataclass(frozen=True)
class Section:
    """The workers of one revision.

    `endpoint`: None if the board does not have it. `answers`: whether the endpoint's state is about this revision.
    """

    revision: str
    workers: tuple[WorkerRow, ...]
    endpoint: EndpointRow | None = None
    answers: bool = True


def sections_of(view: TopView) -> list[Section]:
    """Return a section for each revision, the graph's own workers first, the others in order of endpoints."""
    endpoints = {row.name: row for row in view.endpoints}
    workers: dict[str, list[WorkerRow]] = {row.revision: [] for row in view.endpoints}
    for row in (row for row in view.workers if row.revision):
        workers.setdefault(row.revision, []).append(row)
    sections = []
    for revision in sorted(workers, key=lambda text: (endpoint_of(text) != MAIN, parse_revision(text))):
        endpoint = endpoints.get(endpoint_of(revision))
        answers = endpoint is None or endpoint.revision == revision
        sections.append(Section(revision, tuple(workers[revision]), endpoint, answers))
    return sections


def heading_of(section: Section, width: int) -> Text:
    """Return the heading of a section, on as many lines as it needs."""
    endpoint = section.endpoint
    if endpoint is None:
        return Text(section.revision, style="bold")
    if not section.answers:
        is_next = parse_revision(section.revision) > parse_revision(endpoint.revision)
        doing = "takes no requests yet" if is_next else "finishes its requests"
        return Text(f"{section.revision}  {doing}", style="bold")
    name = endpoint.name if endpoint.adapter_of is not None else section.revision
    lines = lines_of((name, endpoint.state, *_endpoint_figures(endpoint)), width)
    heading = Text("\n".join(lines), style="bold")
    begins = len(name)
    at = heading.plain.index(endpoint.state, begins)
    heading.stylize(STYLES.get(endpoint.state, ""), at, at + len(endpoint.state))
    for line in _reasons(endpoint):
        heading.append(f"\n{line}", style="not bold dim")
    return heading


def unqualified(row: WorkerRow) -> str:
    """The name of a worker below the heading of its revision."""
    return short_watcher(row.watcher).removeprefix(f"{row.revision}_")


def _reasons(row: EndpointRow) -> Iterator[str]:
    """Why its state is what it is, and what was done to it last unless that is the same."""
    if row.reason:
        yield row.reason
    if row.last and row.state not in ("parked", "asleep"):
        yield f"{clock_of(row.last_at)} {row.last}"


def clock_of(time: float) -> str:
    """The local time of a Unix time, as 12:30:45."""
    return f"{datetime.fromtimestamp(time).astimezone():%H:%M:%S}"


def _endpoint_figures(row: EndpointRow) -> Iterator[str]:
    if row.adapter_of is not None:
        yield f"adapter of {row.adapter_of}"
    else:
        yield f"{row.ready} of {row.wanted} {'worker' if row.wanted == 1 else 'workers'}"
    if row.parked:
        yield f"{row.parked} parked"
    if row.wanted_prefill or row.ready_prefill:
        yield f"{row.ready_prefill} of {row.wanted_prefill} prefill"
    if row.frontend is not None:
        yield f"{shown_number(row.frontend.in_flight)} in flight"
        if row.frontend.held:
            yield f"{row.frontend.held} held"
    if row.tokens_per_s is not None:
        yield f"{row.tokens_per_s:.0f} tok/s"
    if row.kv_usage is not None:
        yield f"KV {row.kv_usage:.0%}"
    if row.frontend is not None and row.frontend.ttft_s is not None:
        yield f"TTFT {shown_seconds(row.frontend.ttft_s)}"
    if row.queue is not None:
        yield f"queue: {row.queue.waiting} waiting, {row.queue.in_hand} in hand"
    yield from map(_planned, row.planned)


def _planned(report: EndpointReport) -> str:
    """What the planner wants, and what the budget of devices leaves of it."""
    role = " prefill" if report.role == PREFILL_ROLE else ""
    granted = "" if report.share in (None, report.wanted) else f", gets {report.share}"
    return f"planner: wants {report.wanted}{role}{granted}"


def shown_number(value: float | None, form: str = "d") -> str:
    """A number; "-" if it is not known."""
    return UNKNOWN if value is None else format(value, form)


def shown_seconds(value: float | None) -> str:
    """A time in seconds or milliseconds; "-" if it is not known."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


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
        if section.endpoint is not None or endpoint_of(section.revision) != MAIN:
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
