"""`dynamo scale`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli import completion_values
from dynamo_local.cli.console import Console
from dynamo_local.cli.numbers import FiniteRange
from dynamo_local.cli.options import JSON_HELP, namespace_option, paths_of
from dynamo_local.core.errors import SupervisorError

if TYPE_CHECKING:
    from dynamo_local.core.planning.actions import ActionOutcome

FORCE_HELP = "Proceed even if no worker is left to answer requests."

ready_timeout_option = click.option(
    "--ready-timeout",
    type=FiniteRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long each new worker may take to become ready. After that it is removed.  [default: the server's own]",
)


@click.command()
@click.argument(
    "targets", nargs=-1, required=True, metavar="SERVICE=NUMBER...", shell_complete=completion_values.worker_numbers
)
@namespace_option
@click.option("--force", is_flag=True, help=FORCE_HELP)
@ready_timeout_option
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def scale(targets: tuple[str, ...], namespace: str, force: bool, ready_timeout: float | None, as_json: bool) -> None:
    """Set the number of workers of a service.

    SERVICE=NUMBER names a service of the graph and its number of workers. Several services can be given.

    Workers are added or removed one at a time. The command waits until a new worker is ready, and until the requests of
    a worker to be removed have migrated or finished.

    \b
    dynamo scale VllmWorker=3
    dynamo scale VllmWorker=2 PrefillWorker=1
    """
    import asyncio

    import msgspec

    from dynamo_local.supervisor.actuator.commands import parse_targets
    from dynamo_local.supervisor.actuator.commands import scale as scale_workers

    work = scale_workers(
        paths_of(namespace),
        parse_targets(targets),
        Console(err=as_json),
        even_the_last=force,
        ready_deadline_s=ready_timeout,
    )
    outcomes = asyncio.run(work)
    if as_json:
        click.echo(msgspec.json.encode([outcome_fields(outcome) for outcome in outcomes]))
    elif not outcomes:
        click.echo("nothing to do")
    check_done(outcomes)


def outcome_fields(outcome: ActionOutcome) -> dict[str, Any]:
    """Return an outcome as the fields that commands print as JSON."""
    return {
        "action": type(outcome.action).__name__,
        "watcher": outcome.watcher,
        "done": outcome.done,
        "note": outcome.note,
        "took_s": round(outcome.took_s, 3),
    }


def check_done(outcomes: list[ActionOutcome]) -> None:
    """Raise SupervisorError for the first action that was not done."""
    for outcome in outcomes:
        if not outcome.done:
            raise SupervisorError(outcome.note)
