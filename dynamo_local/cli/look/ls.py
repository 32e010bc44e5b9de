"""`dynamo ls`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments.options import JSON_HELP, state_folder
from dynamo_local.cli.output.console import print_json, table

if TYPE_CHECKING:
    from dynamo_local.supervisor.admin.servers import ServerRow

_HEADERS = ("NAMESPACE", "STATE", "URL", "MODELS", "WORKERS", "DEVICES", "SINCE")
_UNKNOWN = "-"


@click.command()
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def ls(as_json: bool) -> None:
    """Show all servers of this user.

    These are the servers of the state folder (DYN_LOCAL_STATE_DIR), each in a namespace of its own. A crashed server is
    one that was killed and has left files. With --json, `control` is the socket of a server's control API.

    \b
    dynamo ls
    dynamo ls --json
    """
    from dynamo_local.core.server_choice import START_REMEDY
    from dynamo_local.supervisor.admin.servers import list_servers

    found = list_servers(state_folder())
    if as_json:
        print_json(found)
    elif not found:
        click.echo(f"no server runs; {START_REMEDY}")
    else:
        click.echo(table(_HEADERS, [_cells(row) for row in found]))
        for row in found:
            if row.note:
                click.echo(f"{row.namespace}: {row.note}")


def _cells(row: ServerRow) -> tuple[str, ...]:
    return (
        row.namespace,
        row.state,
        row.url or _UNKNOWN,
        ", ".join(row.models) or _UNKNOWN,
        _UNKNOWN if row.workers is None else str(row.workers),
        _devices(row),
        _since(row.since),
    )


def _devices(row: ServerRow) -> str:
    from state.devices.allocation import noun

    if not row.devices or row.device_kind is None:
        return _UNKNOWN
    return f"{noun(row.device_kind, len(row.devices))} {','.join(map(str, row.devices))}"


def _since(since: str | None) -> str:
    """Date and time of day without the time zone, in the machine's own."""
    return _UNKNOWN if since is None else since[:19].replace("T", " ")
