"""`dynamo rotate-token`."""

from __future__ import annotations

import click

from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, server_of

_WITHIN_S = 75.0
"""Longer than the server waits."""


@click.command("rotate-token")
@namespace_option
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def rotate_token(namespace: str, as_json: bool) -> None:
    """Replace the token of the bus while requests run.

    The server's processes talk over NATS, which lets in who has the token. Each start of a server makes a new one, kept
    in a file that only its owner can read. Replace it when somebody may have seen it, or on a schedule.

    For a moment both tokens are valid. All processes change to the new one; then NATS refuses the old one, and ends
    connections that still use it. No request fails, and none is answered twice.

    A NATS server of somebody else (--nats-url) keeps its token. For keys of the API: `dynamo key rotate`, or write the
    new key into the file that api-key-file names.

    \b
    dynamo rotate-token
    dynamo events --kind secret        when it was replaced
    """
    import msgspec

    from dynamo_local.control.operations import ROTATE_TOKEN
    from dynamo_local.core.names import short_watcher

    answer = server_of(namespace).do(ROTATE_TOKEN, timeout_s=_WITHIN_S)
    if as_json:
        click.echo(msgspec.json.encode(answer))
        return
    click.echo(f"the token was replaced: {answer['processes']} processes use the new one, and the old one is refused")
    if answer["disconnected"]:
        late = ", ".join(map(short_watcher, answer["disconnected"]))
        click.echo(f"disconnected, since they did not answer in time: {late}. They connect again by themselves.")
