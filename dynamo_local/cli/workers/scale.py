"""`dynamo scale`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.numbers import FiniteRange
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, paths_of
from dynamo_local.cli.output.console import Console
from dynamo_local.core.errors import SupervisorError

if TYPE_CHECKING:
    from dynamo_local.core.messages.endpoints import EndpointView
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
    "targets",
    nargs=-1,
    required=True,
    metavar="SERVICE|ENDPOINT=NUMBER...",
    shell_complete=completion_values.worker_numbers,
)
@namespace_option
@click.option("--force", is_flag=True, help=FORCE_HELP)
@ready_timeout_option
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def scale(targets: tuple[str, ...], namespace: str, force: bool, ready_timeout: float | None, as_json: bool) -> None:
    """Set the number of workers of a service or an endpoint.

    SERVICE=NUMBER names a service of the graph and its number of workers, ENDPOINT=NUMBER an endpoint and its. Several
    can be given.

    Workers of a service are added or removed one at a time. The command waits until a new worker is ready, and until
    the requests of a worker to be removed have migrated or finished. Workers of an endpoint are added and removed by
    the server, within the endpoint's bounds; the command does not wait for them.

    \b
    dynamo scale VllmWorker=3
    dynamo scale VllmWorker=2 PrefillWorker=1
    dynamo scale chat=3
    """
    import asyncio

    import msgspec

    from dynamo_local.supervisor.actuator.commands import parse_targets
    from dynamo_local.supervisor.actuator.commands import scale as scale_workers
    from dynamo_local.supervisor.actuator.endpoint_commands import endpoint_named, scale_endpoints

    paths, wanted = paths_of(namespace), parse_targets(targets)
    of_endpoints = {name: number for name, number in wanted.items() if endpoint_named(name)}
    of_services = {name: number for name, number in wanted.items() if name not in of_endpoints}
    outcomes: list[ActionOutcome] = []
    if of_services:
        console = Console(err=as_json)
        work = scale_workers(paths, of_services, console, even_the_last=force, ready_deadline_s=ready_timeout)
        outcomes = asyncio.run(work)
    all_done = all(outcome.done for outcome in outcomes)
    ordered = scale_endpoints(paths, of_endpoints) if of_endpoints and all_done else []
    if as_json:
        click.echo(msgspec.json.encode([*map(outcome_fields, outcomes), *map(_order_fields, ordered)]))
    elif not outcomes and not ordered:
        click.echo("nothing to do")
    else:
        for endpoint in ordered:
            click.echo(f"{endpoint.spec.name}: {endpoint.status.wanted} wanted, {endpoint.status.ready} ready")
    check_done(outcomes)


def _order_fields(endpoint: EndpointView) -> dict[str, Any]:
    """Return an endpoint whose number of workers was ordered as the fields that are printed as JSON."""
    return {
        "action": "ScaleEndpoint",
        "endpoint": endpoint.spec.name,
        "wanted": endpoint.status.wanted,
        "ready": endpoint.status.ready,
    }


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
