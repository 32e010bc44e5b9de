"""`dynamo config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, server_of
from dynamo_local.cli.command_group import CommandGroup
from dynamo_local.cli.output.console import print_json, table

if TYPE_CHECKING:
    from dynamo_local.control.answers import SettingRow

_HEADERS = ("KEY", "VALUE", "SOURCE", "MEANING")


@click.group(cls=CommandGroup)
def config() -> None:
    """Show or change the live settings of a server.

    \b
    dynamo config get
    dynamo config set max-prefill-queue-size 8
    """


@config.command()
@click.argument("key", required=False, shell_complete=completion_values.settings)
@namespace_option
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
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
        click.echo(table(_HEADERS, [_cells(row) for row in found]))


@config.command(name="set", context_settings={"ignore_unknown_options": True})
@click.argument("key", shell_complete=completion_values.settings)
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


def _cells(row: SettingRow) -> tuple[str, ...]:
    return row.key, str(row.value), row.source, row.help
