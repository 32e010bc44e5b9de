"""The workers of `dynamo top` in sections, one for each revision of an endpoint, with a heading each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from rich.text import Text

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.planner import EndpointReport
from dynamo_local.core.names import endpoint_of, parse_revision, short_watcher
from dynamo_local.monitor.top.columns import lines_of
from dynamo_local.monitor.top.view import EndpointRow, TopView, WorkerRow

UNKNOWN = "-"
STYLES = {
    **dict.fromkeys(
        ("starting", "draining", "revoked", "waiting", "fetching", "waking", "updating", "deleting"), "yellow"
    ),
    **dict.fromkeys(("parked", "asleep"), "blue"),
    "ready": "green",
    "failed": "red",
}


@dataclass(frozen=True)
class Section:
    """The workers of one revision; those of the graph's own model if it is empty.

    `endpoint`: None if the board does not have it. `answers`: whether the endpoint's state is about this revision.
    """

    revision: str
    workers: tuple[WorkerRow, ...]
    endpoint: EndpointRow | None = None
    answers: bool = True


def sections_of(view: TopView) -> list[Section]:
    """Return the graph's own workers, if it has any, then a section for each revision, in order of endpoints."""
    endpoints = {row.name: row for row in view.endpoints}
    workers: dict[str, list[WorkerRow]] = {row.revision: [] for row in view.endpoints}
    for row in view.workers:
        workers.setdefault(row.revision, []).append(row)
    own = workers.pop("", [])
    sections = [Section("", tuple(own))] if own else []
    for revision in sorted(workers, key=parse_revision):
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
    lines = lines_of((name, endpoint.state, *_figures(endpoint)), width)
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


def _figures(row: EndpointRow) -> Iterator[str]:
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
