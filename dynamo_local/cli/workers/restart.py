"""`dynamo restart`."""

from __future__ import annotations

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, server_of
from dynamo_local.cli.output.console import Console
from dynamo_local.cli.workers.scale import check_done, ready_timeout_option


@click.command()
@click.argument("name", metavar="SERVICE|ENDPOINT|WATCHER", shell_complete=completion_values.services_and_watchers)
@namespace_option
@click.option("--force", is_flag=True, help="Proceed even if no worker answers requests meanwhile.")
@ready_timeout_option
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
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
