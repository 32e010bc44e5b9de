"""`dynamo config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, paths_of
from dynamo_local.cli.command_group import CommandGroup
from dynamo_local.cli.output.console import table

if TYPE_CHECKING:
    from dynamo_local.supervisor.admin.orders.settings import SettingRow

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
    import asyncio

    import msgspec

    from dynamo_local.supervisor.admin.orders.settings import get_settings

    found = asyncio.run(get_settings(paths_of(namespace), key))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
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
    import asyncio

    from dynamo_local.supervisor.admin.orders.settings import set_value

    changed = asyncio.run(set_value(paths_of(namespace), key, value))
    click.echo(f"{changed.key} is {changed.value} now")


def _cells(row: SettingRow) -> tuple[str, ...]:
    return row.key, str(row.value), row.source, row.help
