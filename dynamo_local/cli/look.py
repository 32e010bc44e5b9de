"""`dynamo ps`, `ls`, `route`, `usage` and `describe`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from dynamo_local.cli import completion
from dynamo_local.cli.options import (
    endpoint_option,
    json_option,
    namespace_option,
    paths_of_kept,
    server_of,
    state_folder,
)
from dynamo_local.cli.output import date, print_json, print_result, table
from dynamo_local.core.names import MAIN, short_watcher, shown_node
from dynamo_local.core.shares import shown_devices

if TYPE_CHECKING:
    from dynamo_local.control.answers import WatcherRow
    from dynamo_local.control.descriptions import RouteLine, RoutesView
    from dynamo_local.core.messages.kv import KvWays
    from dynamo_local.core.messages.routing import WeighedWorker
    from dynamo_local.core.usage.totals import Sums, UsageReport
    from dynamo_local.supervisor.admin.servers import ServerRow

_PS_HEADERS = ("WATCHER", "ENDPOINT", "COMPONENT", "ROLE", "NODE", "PID", "DEVICES", "STATE", "DETAIL")

_LS_HEADERS = ("NAMESPACE", "STATE", "URL", "MODELS", "WORKERS", "DEVICES", "SINCE")
_UNKNOWN = "-"
_ROUTE_HEADERS: tuple[str, ...] = ("REQUEST", "WORKER", "TOKENS", "CACHED", "PULLS FROM", "AGE")
_CANDIDATE_HEADERS: tuple[str, ...] = ("", "WORKER", "COST", "CACHED", "UNCACHED", "QUEUED", "REQUESTS")
_TIME_HEADERS: tuple[str, ...] = ("PLACE", "PREFILL", "STEP")
_TIME = "a time before now such as 12h, 1d or 2w, a date, or a date and a time"
_COLUMNS = ("REQUESTS", "FAILED", "PROMPT", "CACHED", "OUTPUT", "SECONDS")


@click.command()
@namespace_option
@json_option
def ps(namespace: str, as_json: bool) -> None:
    """List the processes of a server, with their states and devices.

    The table has the pid, role, devices, state and load of each process, its endpoint if the server has endpoints, and
    its node if they are on several.
    Below it are the devices that other servers hold.

    \b
    dynamo ps
    dynamo ps --json | jq '.[].watcher'
    """
    import msgspec

    from dynamo_local.control.answers import WatcherRow
    from dynamo_local.control.operations import LIST_WORKERS

    query = None if as_json else {"others": "true"}
    answer = server_of(namespace).do(LIST_WORKERS, query=query)
    if as_json:
        print_json(answer["data"])
        return
    click.echo(table_of_processes(msgspec.convert(answer["data"], list[WatcherRow])))
    for line in answer["held_by_others"]:
        click.echo(line)


def table_of_processes(rows: Sequence[WatcherRow]) -> str:
    """Return the rows as text, with a column of endpoints if there are any, and of nodes if there are several."""
    without = ["ENDPOINT"] if all(row.is_of_graph for row in rows) else []
    if len({row.node for row in rows}) < 2:
        without.append("NODE")
    return table(_PS_HEADERS, list(map(_ps_cells, rows)), without)


def _ps_cells(row: WatcherRow) -> tuple[str, ...]:
    return (
        short_watcher(row.watcher),
        "-" if row.is_of_graph else row.endpoint,
        row.component,
        row.role,
        shown_node(row.node),
        "-" if row.pid is None else str(row.pid),
        shown_devices(row.devices, row.share) or "-",
        row.state,
        row.url or row.detail or _load(row),
    )


def _kv_between_machines(kv: KvWays) -> list[str]:
    """How KV crosses machines; nothing where all workers are on one."""
    if not kv.elsewhere:
        return []
    if kv.between_machines == "recomputed":
        return ["KV between machines: recomputed"]
    recomputed = kv.elsewhere - kv.network
    others = f" (that of {recomputed} other workers: recomputed)" if recomputed else ""
    return [f"KV between machines: {kv.between_machines}{others}"]


def _load(row: WatcherRow) -> str:
    load = row.load
    if load is None:
        return ""
    known = (("running", load.running), ("waiting", load.waiting))
    words = [f"{number} {what}" for what, number in known if number is not None]
    if load.kv_usage is not None:
        words.append(f"KV {load.kv_usage:.0%}")
    if row.no_transfer is not None:
        words.append(f"no KV transfer: {row.no_transfer}")
    elif row.kv is not None:
        words += _kv_between_machines(row.kv)
    return ", ".join(words)


@click.command()
@json_option
def ls(as_json: bool) -> None:
    """Show all servers of this user.

    These are the servers of the state folder (DYN_LOCAL_STATE_DIR), each in a namespace of its own. A crashed server is
    one that was killed and has left files. With --json, `control` is the socket of a server's control API.

    \b
    dynamo ls
    dynamo ls --json
    """
    from dynamo_local.core.server_choice import START_REMEDY
    from dynamo_local.supervisor.admin.servers import list_servers

    found = list_servers(state_folder())
    if as_json:
        print_json(found)
    elif not found:
        click.echo(f"no server runs; {START_REMEDY}")
    else:
        click.echo(table(_LS_HEADERS, [_ls_cells(row) for row in found]))
        for row in found:
            if row.note:
                click.echo(f"{row.namespace}: {row.note}")


def _ls_cells(row: ServerRow) -> tuple[str, ...]:
    return (
        row.namespace,
        row.state,
        row.url or _UNKNOWN,
        ", ".join(row.models) or _UNKNOWN,
        _UNKNOWN if row.workers is None else str(row.workers),
        _devices(row),
        _since(row.since),
    )


def _devices(row: ServerRow) -> str:
    from state.devices.allocation import noun

    if not row.devices or row.device_kind is None:
        return _UNKNOWN
    return f"{noun(row.device_kind, len(row.devices))} {','.join(map(str, row.devices))}"


def _since(since: str | None) -> str:
    """Date and time of day without the time zone, in the machine's own."""
    return _UNKNOWN if since is None else since[:19].replace("T", " ")


@click.command()
@namespace_option
@click.argument("request_id", metavar="[REQUEST]", required=False)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1, max=100),
    default=20,
    show_default=True,
    help="Maximum number of assignments to show, latest first.",
)
@click.option("--explain", is_flag=True, help="Show the candidates of each assignment with their costs, and why.")
@endpoint_option("Show the requests for this endpoint only.")
@json_option
def route(
    namespace: str, request_id: str | None, limit: int, explain: bool, endpoint: str | None, as_json: bool
) -> None:
    """Show to which workers the latest requests went, and why.

    REQUEST is the id of a request, or the beginning of it. CACHED is the part of the request's tokens that the worker
    was expected to have in its KV cache. A request that migrates or is recovered is assigned again. The router keeps
    its latest 128 assignments.

    \b
    dynamo route
    dynamo route --explain -n 1
    dynamo route --explain cmpl-4f
    """
    import msgspec

    from dynamo_local.control.descriptions import RoutesView
    from dynamo_local.control.operations import LIST_ROUTES

    query = {"limit": str(limit), "request": request_id, "endpoint": endpoint}
    answer = server_of(namespace).do(LIST_ROUTES, query=query)
    print_result(answer, lambda it: text_of_routes(msgspec.convert(it, RoutesView), explain=explain), as_json=as_json)


def text_of_routes(view: RoutesView, *, explain: bool) -> str:
    """Return the assignments as a table, or, explained, each with its candidates."""
    first = f"policy {view.policy}"
    if not view.routes:
        return f"{first}; no such request was assigned lately"
    if explain:
        return "\n\n".join([first, *map(_explained, view.routes)])
    return f"{first}\n{table(_ROUTE_HEADERS, [_route_cells(line) for line in view.routes])}"


def _route_cells(line: RouteLine) -> tuple[str, ...]:
    cached = "-" if line.cached is None else str(line.cached)
    return line.request, _short(line.worker), str(line.tokens), cached, _short(line.pull_from), f"{line.age_s:.1f}s"


def _explained(line: RouteLine) -> str:
    endpoint = "" if line.endpoint in {"", MAIN} else f" for {line.endpoint}"
    parts = [
        f"{line.request}{endpoint}, {line.tokens} tokens, {line.age_s:.1f}s ago",
        f"to {_short(line.worker)}: {line.why}",
    ]
    if line.candidates:
        times = _TIME_HEADERS if any(each.place_s is not None for each in line.candidates) else ()
        rows = [_candidate(each, line)[: len(_CANDIDATE_HEADERS + times)] for each in line.candidates]
        parts.append(table(_CANDIDATE_HEADERS + times, rows))
    if line.left_out:
        parts.append(f"and {line.left_out} more")
    return "\n".join(parts)


def _candidate(each: WeighedWorker, line: RouteLine) -> tuple[str, ...]:
    mark = ">" if each.worker == line.worker else ""
    figures = (each.cached, each.uncached, each.queued, each.requests)
    times = (_seconds(each.place_s), _seconds(each.prefill_s), _seconds(each.step_s))
    cost = f"{each.cost:.6g}" if each.place_s is None else _seconds(each.cost)
    return mark, _short(each.worker), cost, *map(str, figures), *times


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}s"


def _short(watcher: str | None) -> str:
    return "-" if watcher is None else short_watcher(watcher)


@click.command()
@namespace_option
@click.option("--since", metavar="TIME", help=f"Show usage from TIME on: {_TIME}.  [default: all that is kept]")
@click.option("--until", metavar="TIME", help="Show usage before TIME.  [default: now]")
@click.option(
    "--by", default="key,endpoint", show_default=True, metavar="GROUPS", help="Groups: key, endpoint, day (of UTC)."
)
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV.")
def usage(namespace: str, since: str | None, until: str | None, by: str, as_json: bool, as_csv: bool) -> None:
    """Show what requests have used, by API key and endpoint.

    These are requests, tokens of prompts (with those that were cached) and of answers, and seconds, by the hour, and
    by the day where they are older than a week. They are kept after the server has ended.

    \b
    dynamo usage --since 1d
    dynamo usage --since 2026-05-01 --until 2026-06-01 --by key,day --csv
    """
    from dynamo_local.core.errors import UsageError
    from dynamo_local.core.usage.totals import as_csv as csv_of
    from dynamo_local.core.usage.totals import as_document, notes, parse_grouping, parse_moment, report
    from state.usage.totals import read_usage

    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other", "give one of the two")
    now = datetime.now(UTC).astimezone()
    since_s, until_s = (None if text is None else parse_moment(text, now) for text in (since, until))
    groups = parse_grouping(by)
    found = report(read_usage(paths_of_kept(namespace, "usage")), since_s, until_s, groups)
    if as_json:
        print_json(as_document(found))
        return
    click.echo(csv_of(found).rstrip("\n") if as_csv else _usage_text(found))
    for note in notes(found):
        click.echo(note, err=True)


def _usage_text(found: UsageReport) -> str:
    rows = [(*(value or "-" for value in row.group), *_usage_cells(row.sums)) for row in found.rows]
    if len(rows) > 1 and found.by:
        rows.append(("total", *("" for _ in found.by[1:]), *_usage_cells(found.total)))
    begins = "" if found.since is None else f" from {date(found.since)}"
    ends = "" if found.until is None else f" until {date(found.until)}"
    if not rows:
        return f"no request has been counted{begins}{ends}"
    whole = table((*(each.upper() for each in found.by), *_COLUMNS), rows)
    return f"usage{begins}{ends}\n{whole}"


def _usage_cells(sums: Sums) -> tuple[str, ...]:
    numbers = (sums.requests, sums.failed, sums.prompt, sums.cached, sums.output)
    return (*map(str, numbers), f"{sums.seconds:.1f}")


@click.command()
@click.argument("name", metavar="WATCHER|ENDPOINT|REQUEST", shell_complete=completion.endpoints_and_watchers)
@namespace_option
@json_option
def describe(name: str, namespace: str, as_json: bool) -> None:
    """Show everything known of a process, endpoint or live request.

    WATCHER is a name that `dynamo ps` shows, ENDPOINT one that `dynamo endpoint list` shows, REQUEST the id of a
    request or its first characters. Secrets in the configuration are masked.

    \b
    dynamo describe VllmWorker_1
    dynamo describe chat
    dynamo describe cmpl-92fe --json
    """
    import msgspec

    from dynamo_local.control.operations import DESCRIBE

    answer = server_of(namespace).do(DESCRIBE, name=name)
    if as_json:
        (found,) = answer.values()
        print_json(found)
        return
    from dynamo_local.cli.description import text_of
    from dynamo_local.control.descriptions import Description

    click.echo(text_of(msgspec.convert(answer, Description).found))
