"""`dynamo scale`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.numbers import FiniteRange
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, server_of
from dynamo_local.cli.output.console import Console
from dynamo_local.core.errors import SupervisorError, UsageError

if TYPE_CHECKING:
    from dynamo_local.core.messages.endpoints import EndpointView

FORCE_HELP = "Proceed even if no worker is left to answer requests."

_OF_WATCHER = re.compile(
    r"(?:[A-Za-z0-9-]+_)?(?:(?P<endpoint>[a-z0-9-]+)@[0-9]+_)?(?P<service>[A-Z][A-Za-z0-9]*)(?:_[0-9]+)?"
)
_TARGET = re.compile(r"(?P<name>[A-Z][A-Za-z0-9]*|[a-z0-9][a-z0-9-]*)=(?P<number>[0-9]{1,4})")

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

    import msgspec

    from dynamo_local.control.operations import SCALE, SCALE_ENDPOINT
    from dynamo_local.control.orders import carry_out
    from dynamo_local.core.names import endpoint_named
    from dynamo_local.supervisor.admin.orders.endpoints import EndpointClient

    server, wanted = server_of(namespace), parse_targets(targets)
    of_endpoints = {name: number for name, number in wanted.items() if endpoint_named(name)}
    of_services = {name: number for name, number in wanted.items() if name not in of_endpoints}
    outcomes: Sequence[Mapping[str, Any]] = ()
    if of_services:
        fields = {"targets": of_services, "force": force, "ready_timeout_s": ready_timeout}
        outcomes = carry_out(server, SCALE, fields, Console(err=as_json).step)
    all_done = all(outcome["done"] for outcome in outcomes)
    ordered = [
        EndpointClient(server).order(SCALE_ENDPOINT, name, {"workers": number})
        for name, number in (of_endpoints if all_done else {}).items()
    ]
    if as_json:
        click.echo(msgspec.json.encode([*outcomes, *map(_order_fields, ordered)]))
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


def parse_targets(arguments: Sequence[str]) -> dict[str, int]:
    """Number of workers by service or endpoint, from arguments such as "VllmWorker=3" and "chat=3". Raises
    UsageError."""
    targets: dict[str, int] = {}
    for argument in arguments:
        match = _TARGET.fullmatch(argument)
        if match is None:
            raise _no_target(argument)
        if match["name"] in targets:
            raise UsageError(f"{match['name']} is given twice", "give each service and endpoint once")
        targets[match["name"]] = int(match["number"])
    return targets


def _no_target(argument: str) -> UsageError:
    """The error for an argument that is not SERVICE=NUMBER. Many write a watcher's name for its service."""
    name, _, number = argument.partition("=")
    watcher = _OF_WATCHER.fullmatch(name)
    if watcher is None or not number.isdigit():
        return UsageError(f"{argument!r} does not say how many", "write SERVICE=NUMBER, such as VllmWorker=2")
    service, endpoint = watcher["service"], watcher["endpoint"]
    if name == service:
        return UsageError(f"{number} is more {service}s than a server can have", "ask for fewer workers")
    whole = f"endpoint, {endpoint}" if endpoint else f"service, {service}"
    return UsageError(
        f"{name} is the name of one process; the number of processes is set for its {whole}",
        f"write {endpoint or service}={number}",
    )


def check_done(outcomes: Sequence[Mapping[str, Any]]) -> None:
    """Raise SupervisorError for the first action that was not done."""
    for outcome in outcomes:
        if not outcome["done"]:
            raise SupervisorError(outcome["note"])
