"""`dynamo describe`."""

from __future__ import annotations

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, server_of
from dynamo_local.cli.output.console import print_json


@click.command()
@click.argument("name", metavar="WATCHER|ENDPOINT|REQUEST", shell_complete=completion_values.endpoints_and_watchers)
@namespace_option
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def describe(name: str, namespace: str, as_json: bool) -> None:
    """Show everything known of a process, endpoint or live request.

    WATCHER is a name that `dynamo ps` shows, ENDPOINT one that `dynamo endpoint list` shows, REQUEST the id of a
    request or its first characters. Secrets in the configuration are masked.

    \b
    dynamo describe VllmWorker_1
    dynamo describe chat
    dynamo describe cmpl-92fe --json
    """
    import msgspec

    from dynamo_local.control.operations import DESCRIBE

    answer = server_of(namespace).do(DESCRIBE, name=name)
    if as_json:
        (found,) = answer.values()
        print_json(found)
        return
    from dynamo_local.cli.output.description import text_of
    from dynamo_local.control.descriptions import Description

    click.echo(text_of(msgspec.convert(answer, Description).found))
