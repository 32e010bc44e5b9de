"""`dynamo migrate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, server_of
from dynamo_local.cli.output.console import print_json, table
from dynamo_local.core.errors import UsageError
from dynamo_local.core.names import short_watcher

if TYPE_CHECKING:
    from dynamo_local.core.messages.admin import MigrationResult

_MIGRATED_WITHIN_S = 150.0
"""Longer than the server waits."""

_HEADERS = ("REQUEST", "OUTCOME", "WORKER", "GAP", "STEPS", "WHY")


@click.command()
@click.argument("request", required=False, shell_complete=completion_values.requests)
@namespace_option
@click.option(
    "--from",
    "source",
    metavar="WATCHER",
    shell_complete=completion_values.workers,
    help="Migrate all requests of this worker.",
)
@click.option(
    "--to",
    "destination",
    metavar="WATCHER",
    help="Destination worker.  [default: the worker with the most free capacity]",
)
@click.option("--cold", is_flag=True, help="Do not copy the KV cache; the destination computes it again.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def migrate(
    namespace: str, request: str | None, source: str | None, destination: str | None, cold: bool, as_json: bool
) -> None:
    """Migrate running requests to another worker.

    The KV cache migrates with a request, and its client receives every token once.

    REQUEST is the id that the client received, as `dynamo requests` shows it, or its first characters. Give either
    REQUEST or --from.

    \b
    dynamo migrate cmpl-92fe
    dynamo migrate --from VllmWorker_1 --to VllmWorker
    """
    import msgspec

    from dynamo_local.control.operations import MIGRATE
    from dynamo_local.core.messages.admin import MigrationResult

    if (request is None) == (source is None):
        raise UsageError("name either a request or a worker to migrate from", "give REQUEST or --from WATCHER")
    wish = {"request": request, "from": source, "to": destination, "cold": cold}
    answer = server_of(namespace).do(MIGRATE, wish, timeout_s=_MIGRATED_WITHIN_S)["data"]
    if as_json:
        print_json(answer)
    else:
        found = msgspec.convert(answer, list[MigrationResult])
        click.echo(table(_HEADERS, [_cells(line) for line in found]) if found else "there is no request to migrate")


def _cells(line: MigrationResult) -> tuple[str, ...]:
    gap = "-" if line.gap_s is None else f"{line.gap_s * 1e3:.0f}ms"
    steps = "-" if line.gap_steps is None else f"{line.gap_steps:.1f}"
    return line.request, line.outcome, short_watcher(line.worker or "-"), gap, steps, line.why
