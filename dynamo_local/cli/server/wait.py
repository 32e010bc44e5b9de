"""`dynamo wait`."""

from __future__ import annotations

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.numbers import FiniteRange
from dynamo_local.cli.arguments.options import namespace_option, paths_of
from dynamo_local.cli.output.console import Console

DEFAULT_TIMEOUT_S = 600.0


@click.command()
@click.argument("endpoint", required=False, shell_complete=completion_values.endpoints)
@namespace_option
@click.option("--ready/--stopped", default=True, show_default=True, help="State of the server to wait for.")
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    metavar="NUMBER",
    help="Wait until this number of workers is ready.  [default: all that the server or ENDPOINT is to have]",
)
@click.option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait.",
)
def wait(endpoint: str | None, namespace: str, ready: bool, workers: int | None, timeout: float) -> None:
    """Wait until a server or an endpoint is ready.

    With --stopped, wait until the server has ended. Neither need exist yet. The command ends with 1 if the time is
    over, if a server that starts has ended, or if ENDPOINT has failed. Without ENDPOINT, endpoints that come up are
    waited for as well; those that wait for devices or have failed are not. Progress is shown on standard error.

    \b
    dynamo wait
    dynamo wait chat
    dynamo wait --workers 2 --timeout 60
    dynamo wait --stopped --namespace second
    """
    from functools import partial

    from dynamo_local.cli.server.waiting import wait_until_ready, wait_until_stopped
    from dynamo_local.core.errors import NotRunningError, UsageError

    if ready:
        wait_until_ready(partial(paths_of, namespace), workers, timeout, Console(err=True), endpoint)
        return
    if workers is not None or endpoint is not None:
        given = "--workers" if workers is not None else "ENDPOINT"
        raise UsageError(f"{given} goes with --ready only", "leave one of them out")
    try:
        paths = paths_of(namespace)
    except NotRunningError:
        return
    wait_until_stopped(paths, timeout)
