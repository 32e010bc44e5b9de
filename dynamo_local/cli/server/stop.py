"""`dynamo stop`."""

from __future__ import annotations

import click

from dynamo_local.cli.console import Console
from dynamo_local.cli.options import namespace_option, paths_of


@click.command()
@namespace_option
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until the server has ended.",
)
def stop(namespace: str, timeout: float) -> None:
    """Stop the running server, or clean up after a crashed one."""
    from dynamo_local.supervisor.admin.stop import stop as stop_server

    stop_server(paths_of(namespace), timeout, Console())
