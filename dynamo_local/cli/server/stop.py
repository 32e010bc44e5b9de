"""`dynamo stop`."""

from __future__ import annotations

import click

from dynamo_local.cli.arguments.numbers import FiniteRange
from dynamo_local.cli.arguments.options import namespace_option, paths_to_stop
from dynamo_local.cli.output.console import Console


@click.command()
@namespace_option
@click.option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until the server has ended.",
)
@click.option("--forget", is_flag=True, help="Also drop the endpoints that were created.")
def stop(namespace: str, timeout: float, forget: bool) -> None:
    """Stop a running server, or clean up after a crash.

    Requests in flight are finished first, for as long as the server's --drain-timeout allows. Endpoints come back with
    the next server unless --forget is given.

    \b
    dynamo stop
    dynamo stop --namespace second
    """
    from dynamo_local.supervisor.admin.servers import stop as stop_server

    stop_server(paths_to_stop(namespace), timeout, Console(), forget_endpoints=forget)
