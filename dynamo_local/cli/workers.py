"""`dynamo scale`, `drain`, `restart` and `role`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli import completion
from dynamo_local.cli.options import FiniteRange, json_option, namespace_option, server_of
from dynamo_local.cli.output import Console
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
    shell_complete=completion.worker_numbers,
)
@namespace_option
@click.option("--force", is_flag=True, help=FORCE_HELP)
@ready_timeout_option
@json_option
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
    from dynamo_local.supervisor.admin.endpoints import EndpointClient

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


@click.command()
@click.argument("watcher", shell_complete=completion.workers)
@namespace_option
@click.option("--force", is_flag=True, help=FORCE_HELP)
@json_option
def drain(watcher: str, namespace: str, force: bool, as_json: bool) -> None:
    """Drain and stop one worker.

    The worker gets no new requests. Its requests migrate or finish; then its process ends, and its devices are free.

    WATCHER is the worker's name as `dynamo ps` shows it. `dynamo scale` adds a worker again. The number of an
    endpoint's workers is kept by the server: `dynamo scale ENDPOINT=NUMBER` sets it.

    \b
    dynamo drain VllmWorker_1
    """
    import msgspec

    from dynamo_local.control.operations import DRAIN_WORKER
    from dynamo_local.control.orders import carry_out

    step = Console(err=as_json).step
    (outcome,) = carry_out(server_of(namespace), DRAIN_WORKER, {"force": force}, step, watcher=watcher)
    if as_json:
        click.echo(msgspec.json.encode(outcome))
    check_done([outcome])


@click.command()
@click.argument("name", metavar="SERVICE|ENDPOINT|WATCHER", shell_complete=completion.services_and_watchers)
@namespace_option
@click.option("--force", is_flag=True, help="Proceed even if no worker answers requests meanwhile.")
@ready_timeout_option
@json_option
def restart(name: str, namespace: str, force: bool, ready_timeout: float | None, as_json: bool) -> None:
    """Restart a service or one worker with no failed requests.

    SERVICE restarts all workers of a service, one at a time, ENDPOINT those of an endpoint; WATCHER restarts one
    worker. If a device is free, a new
    worker (for example VllmWorker_1) starts first; then the requests of the old one migrate to other workers, and it
    ends. If no device is free, the requests of the old worker migrate first, and its new process takes over its name
    and devices. The command ends at the first worker that does not become ready; workers not yet restarted keep
    running.

    Services that are not workers are stopped and started again under their names. The service that clients connect to
    cannot be restarted.

    Settings stay as they were when the server started: a changed configuration file is not read.

    \b
    dynamo restart VllmWorker           all workers of the service, one after the other
    dynamo restart VllmWorker_1         one worker
    dynamo restart chat                 all workers of the endpoint, one after the other
    """
    import msgspec

    from dynamo_local.control.operations import RESTART_WORKERS
    from dynamo_local.control.orders import carry_out

    fields = {"name": name, "force": force, "ready_timeout_s": ready_timeout}
    outcomes = carry_out(server_of(namespace), RESTART_WORKERS, fields, Console(err=as_json).step)
    if as_json:
        click.echo(msgspec.json.encode(outcomes))
    check_done(outcomes)


@click.command()
@click.argument("watcher", shell_complete=completion.workers)
@click.argument("role", metavar="ROLE", type=click.Choice(["prefill", "decode"]))
@namespace_option
@click.option("--force", is_flag=True, help="Proceed even if no worker is left that decodes.")
@json_option
def role(watcher: str, role: str, namespace: str, force: bool, as_json: bool) -> None:
    """Change the ROLE of a worker to prefill or decode.

    WATCHER is the worker's name as `dynamo ps` shows it. The worker does not load its model again. It finishes the
    requests that it has. It keeps the new role when it is restarted.

    \b
    dynamo role VllmWorker_1 prefill
    """
    import msgspec

    from dynamo_local.control.operations import CHANGE_ROLE

    wish = {"role": role, "force": force}
    answer = server_of(namespace).do(CHANGE_ROLE, wish, watcher=watcher)
    click.echo(msgspec.json.encode(answer) if as_json else f"{watcher}: {answer['role']}")
