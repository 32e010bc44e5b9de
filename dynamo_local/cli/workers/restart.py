"""`dynamo restart`."""

from __future__ import annotations

import click

from dynamo_local.cli.console import Console
from dynamo_local.cli.options import JSON_HELP, namespace_option, paths_of
from dynamo_local.cli.workers.scale import check_done, outcome_fields, ready_timeout_option


@click.command()
@click.argument("name", metavar="SERVICE|WATCHER")
@namespace_option
@click.option("--force", is_flag=True, help="Also when nobody answers requests meanwhile.")
@ready_timeout_option
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def restart(name: str, namespace: str, force: bool, ready_timeout: float | None, as_json: bool) -> None:
    """Have new processes do the work of a service, or of one watcher, without a failed request.

    Workers are restarted one at a time. Where a device is free, a new worker (VllmWorker_1, say) comes first, then the
    requests of the old one move to the others, and it ends. Where none is free, the old one is emptied first, and its
    next process has its name and devices. The first worker that does not become ready ends the command; those that are
    not restarted yet go on as they are.

    Other services are ended and started again under their names. The one that clients connect to cannot be restarted.

    Settings stay what they were when the server started: a configuration file that has changed is not read.

    \b
    dynamo restart VllmWorker           all its workers, one after the other
    dynamo restart dynamo_VllmWorker_1  that one
    """
    import asyncio

    import msgspec

    from dynamo_local.supervisor.actuator.commands import restart as restart_processes

    work = restart_processes(
        paths_of(namespace), name, Console(err=as_json), even_the_last=force, ready_deadline_s=ready_timeout
    )
    outcomes = asyncio.run(work)
    if as_json:
        click.echo(msgspec.json.encode([outcome_fields(outcome) for outcome in outcomes]))
    check_done(outcomes)
