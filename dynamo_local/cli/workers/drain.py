"""`dynamo drain`."""

from __future__ import annotations

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, server_of
from dynamo_local.cli.output.console import Console
from dynamo_local.cli.workers.scale import FORCE_HELP, check_done


@click.command()
@click.argument("watcher", shell_complete=completion_values.workers)
@namespace_option
@click.option("--force", is_flag=True, help=FORCE_HELP)
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
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
