"""`dynamo role`."""

from __future__ import annotations

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, server_of


@click.command()
@click.argument("watcher", shell_complete=completion_values.workers)
@click.argument("role", metavar="ROLE", type=click.Choice(["prefill", "decode"]))
@namespace_option
@click.option("--force", is_flag=True, help="Proceed even if no worker is left that decodes.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
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
