"""`dynamo requests`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments.options import JSON_HELP, endpoint_option, namespace_option, server_of
from dynamo_local.cli.output.console import print_json, table
from dynamo_local.core.names import short_watcher

if TYPE_CHECKING:
    from dynamo_local.core.messages.admin import RequestLine

_HEADERS: tuple[str, ...] = ("REQUEST", "WORKER", "EPOCH", "PROMPT", "TOKENS", "AGE", "MIGRATES")
_ENDPOINT = "ENDPOINT"


@click.command()
@namespace_option
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Maximum number of requests to show of each frontend, oldest first.",
)
@click.option("--worker", metavar="WATCHER", help="Show the requests of this worker only.")
@endpoint_option("Show the requests for this endpoint only.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def requests(namespace: str, limit: int, worker: str | None, endpoint: str | None, as_json: bool) -> None:
    """List the requests in flight, with their workers.

    The table has the worker, epoch, tokens and age of each request, and whether it can migrate. The epoch counts the
    request's assignments to workers. It is above 1 if the request has migrated, was recovered from a lost worker, or
    had its prompt prefilled by another worker. A request that is held until a worker is ready has no id yet: its worker
    is shown as `held`, with the reason at the end.

    \b
    dynamo requests
    dynamo requests --endpoint chat
    dynamo requests --json -n 1000
    """
    import msgspec

    from dynamo_local.control.answers import RequestsView
    from dynamo_local.control.operations import LIST_REQUESTS

    query = {"limit": str(limit), "worker": worker, "endpoint": endpoint}
    answer = server_of(namespace).do(LIST_REQUESTS, query=query)
    if as_json:
        print_json(answer)
        return
    view = msgspec.convert(answer, RequestsView)
    click.echo(as_table(view.requests))
    if view.left_out:
        click.echo(f"and {view.left_out} more")


def as_table(lines: Sequence[RequestLine]) -> str:
    """Return the lines as text, with a column of endpoints if any request is for one."""
    headers, rows = _HEADERS, [_cells(line) for line in lines]
    if any(line.endpoint for line in lines):
        headers = (headers[0], _ENDPOINT, *headers[1:])
        rows = [(row[0], line.endpoint or "-", *row[1:]) for row, line in zip(rows, lines, strict=True)]
    return table(headers, rows)


def _cells(line: RequestLine) -> tuple[str, ...]:
    if line.held is not None:
        return line.request, "held", "-", "-", "-", f"{line.age_s:.1f}s", f"waits: {line.held}"
    migrates = f"no: {line.stays}" if line.stays else "yes"
    if line.moving_to is not None:
        migrates = f"to {short_watcher(line.moving_to)}"
    counts = (str(line.epoch), str(line.prompt_tokens), str(line.tokens))
    return line.request, short_watcher(line.worker or "-"), *counts, f"{line.age_s:.1f}s", migrates
