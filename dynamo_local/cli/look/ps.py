"""`dynamo ps`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, server_of
from dynamo_local.cli.output.console import print_json, table
from dynamo_local.core.names import short_watcher, shown_node
from dynamo_local.core.shares import shown_devices

if TYPE_CHECKING:
    from dynamo_local.control.answers import WatcherRow
    from dynamo_local.core.messages.kv import KvWays

_HEADERS = ("WATCHER", "ENDPOINT", "COMPONENT", "ROLE", "NODE", "PID", "DEVICES", "STATE", "DETAIL")


@click.command()
@namespace_option
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def ps(namespace: str, as_json: bool) -> None:
    """List the processes of a server, with their states and devices.

    The table has the pid, role, devices, state and load of each process, its endpoint if the server has endpoints, and
    its node if they are on several.
    Below it are the devices that other servers hold.

    \b
    dynamo ps
    dynamo ps --json | jq '.[].watcher'
    """
    import msgspec

    from dynamo_local.control.answers import WatcherRow
    from dynamo_local.control.operations import LIST_WORKERS

    query = None if as_json else {"others": "true"}
    answer = server_of(namespace).do(LIST_WORKERS, query=query)
    if as_json:
        print_json(answer["data"])
        return
    click.echo(as_table(msgspec.convert(answer["data"], list[WatcherRow])))
    for line in answer["held_by_others"]:
        click.echo(line)


def as_table(rows: Sequence[WatcherRow]) -> str:
    """Return the rows as text, with a column of endpoints if there are any, and of nodes if there are several."""
    left_out = set[str]()
    if not any(row.endpoint for row in rows):
        left_out.add("ENDPOINT")
    if len({row.node for row in rows}) < 2:
        left_out.add("NODE")
    kept = [column for column, header in enumerate(_HEADERS) if header not in left_out]
    lines = [tuple(line[column] for column in kept) for line in (_HEADERS, *map(_cells, rows))]
    return table(lines[0], lines[1:])


def _cells(row: WatcherRow) -> tuple[str, ...]:
    return (
        short_watcher(row.watcher),
        row.endpoint or "-",
        row.component,
        row.role,
        shown_node(row.node),
        "-" if row.pid is None else str(row.pid),
        shown_devices(row.devices, row.share) or "-",
        row.state,
        row.url or row.detail or _load(row),
    )


def _kv_between_machines(kv: KvWays) -> list[str]:
    """How KV crosses machines; nothing where all workers are on one."""
    if not kv.elsewhere:
        return []
    if kv.between_machines == "recomputed":
        return ["KV between machines: recomputed"]
    recomputed = kv.elsewhere - kv.network
    others = f" (that of {recomputed} other workers: recomputed)" if recomputed else ""
    return [f"KV between machines: {kv.between_machines}{others}"]


def _load(row: WatcherRow) -> str:
    load = row.load
    if load is None:
        return ""
    known = (("running", load.running), ("waiting", load.waiting))
    words = [f"{number} {what}" for what, number in known if number is not None]
    if load.kv_usage is not None:
        words.append(f"KV {load.kv_usage:.0%}")
    if row.no_transfer is not None:
        words.append(f"no KV transfer: {row.no_transfer}")
    elif row.kv is not None:
        words += _kv_between_machines(row.kv)
    return ", ".join(words)
