"""`dynamo wait`, `stop`, `config` and `rotate-token`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dynamo_local.cli import completion
from dynamo_local.cli.commands import CommandGroup
from dynamo_local.cli.options import FiniteRange, json_option, namespace_option, paths_of, paths_to_stop, server_of
from dynamo_local.cli.output import Console, print_json, table

if TYPE_CHECKING:
    from dynamo_local.control.answers import SettingRow

_WAIT_S = 600.0
_SETTING_HEADERS = ("KEY", "VALUE", "SOURCE", "MEANING")
_ROTATED_WITHIN_S = 75.0
"""Longer than the server waits."""


@click.command()
@click.argument("endpoint", required=False, shell_complete=completion.endpoints)
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
    default=_WAIT_S,
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

    from dynamo_local.cli.waiting import wait_until_ready, wait_until_stopped
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


@click.group(cls=CommandGroup)
def config() -> None:
    """Show or change the live settings of a server.

    \b
    dynamo config get
    dynamo config set max-prefill-queue-size 8
    """


@config.command()
@click.argument("key", required=False, shell_complete=completion.settings)
@namespace_option
@json_option
def get(key: str | None, namespace: str, as_json: bool) -> None:
    """Show all live settings, or the value of KEY.

    SOURCE says where a value comes from: `set` (by `dynamo config set`), `configuration` (of the graph) or
    `default`.
    """
    import msgspec

    from dynamo_local.control.answers import SettingRow
    from dynamo_local.control.operations import LIST_SETTINGS
    from dynamo_local.core.live_settings import setting

    wanted = None if key is None else setting(key).name
    answer = server_of(namespace).do(LIST_SETTINGS)["data"]
    found = [row for row in msgspec.convert(answer, list[SettingRow]) if wanted in (None, row.key)]
    if as_json:
        print_json(found)
    elif key is not None:
        click.echo("\n".join(f"{row.value} ({row.source})" for row in found))
    else:
        click.echo(table(_SETTING_HEADERS, [_setting_cells(row) for row in found]))


@config.command(name="set", context_settings={"ignore_unknown_options": True})
@click.argument("key", shell_complete=completion.settings)
@click.argument("value")
@namespace_option
def set_(key: str, value: str, namespace: str) -> None:
    """Change the live setting KEY to VALUE, until the server ends."""
    from dynamo_local.control.operations import SET_SETTING
    from dynamo_local.core.live_settings import setting

    # Checked here as well: mistakes of the command line need no server to be found.
    wish = {"value": setting(key).parse(value)}
    changed = server_of(namespace).do(SET_SETTING, wish, key=key)
    click.echo(f"{changed['key']} is {changed['value']} now")


def _setting_cells(row: SettingRow) -> tuple[str, ...]:
    return row.key, str(row.value), row.source, row.help


@click.command("rotate-token")
@namespace_option
@json_option
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

    answer = server_of(namespace).do(ROTATE_TOKEN, timeout_s=_ROTATED_WITHIN_S)
    if as_json:
        click.echo(msgspec.json.encode(answer))
        return
    click.echo(f"the token was replaced: {answer['processes']} processes use the new one, and the old one is refused")
    if answer["disconnected"]:
        late = ", ".join(map(short_watcher, answer["disconnected"]))
        click.echo(f"disconnected, since they did not answer in time: {late}. They connect again by themselves.")
