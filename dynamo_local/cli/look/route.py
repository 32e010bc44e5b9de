"""`dynamo route`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments.options import JSON_HELP, endpoint_option, namespace_option, server_of
from dynamo_local.cli.output.console import print_json, table
from dynamo_local.core.names import short_watcher

if TYPE_CHECKING:
    from dynamo_local.control.descriptions import RouteLine, RoutesView
    from dynamo_local.core.messages.routes import WeighedWorker

_HEADERS: tuple[str, ...] = ("REQUEST", "WORKER", "TOKENS", "CACHED", "PULLS FROM", "AGE")
_CANDIDATE_HEADERS: tuple[str, ...] = ("", "WORKER", "COST", "CACHED", "UNCACHED", "QUEUED", "REQUESTS")
_TIME_HEADERS: tuple[str, ...] = ("PLACE", "PREFILL", "STEP")


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
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
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
    if as_json:
        print_json(answer)
    else:
        click.echo(text_of(msgspec.convert(answer, RoutesView), explain=explain))


def text_of(view: RoutesView, *, explain: bool) -> str:
    """Return the assignments as a table, or, explained, each with its candidates."""
    first = f"policy {view.policy}"
    if not view.routes:
        return f"{first}; no such request was assigned lately"
    if explain:
        return "\n\n".join([first, *map(_explained, view.routes)])
    return f"{first}\n{table(_HEADERS, [_cells(line) for line in view.routes])}"


def _cells(line: RouteLine) -> tuple[str, ...]:
    cached = "-" if line.cached is None else str(line.cached)
    return line.request, _short(line.worker), str(line.tokens), cached, _short(line.pull_from), f"{line.age_s:.1f}s"


def _explained(line: RouteLine) -> str:
    endpoint = f" for {line.endpoint}" if line.endpoint else ""
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
