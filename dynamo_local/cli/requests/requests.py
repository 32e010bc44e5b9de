"""`dynamo requests`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dynamo_local.cli.console import table
from dynamo_local.cli.options import JSON_HELP, namespace_option, paths_of

if TYPE_CHECKING:
    from dynamo_local.supervisor.admin.requests import RequestLine

_HEADERS = ("REQUEST", "WORKER", "EPOCH", "PROMPT", "TOKENS", "AGE", "MIGRATES")


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
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def requests(namespace: str, limit: int, as_json: bool) -> None:
    """Show the requests in flight.

    The table has the worker, epoch, tokens and age of each request, and whether it can migrate. The epoch counts the
    request's assignments to workers. It is above 1 if the request has migrated, was recovered from a lost worker, or
    had its prompt prefilled by another worker.
    """
    import asyncio

    import msgspec

    from dynamo_local.supervisor.admin.requests import list_requests

    view = asyncio.run(list_requests(paths_of(namespace), limit))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(view), indent=2))
        return
    click.echo(table(_HEADERS, [_cells(line) for line in view.requests]))
    if view.left_out:
        click.echo(f"and {view.left_out} more")


def _cells(line: RequestLine) -> tuple[str, ...]:
    migrates = f"to {line.moving_to}" if line.moving_to is not None else f"no: {line.stays}" if line.stays else "yes"
    counts = (str(line.epoch), str(line.prompt_tokens), str(line.tokens))
    return line.request, line.worker or "-", *counts, f"{line.age_s:.1f}s", migrates
