"""`dynamo events`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments.age import cutoff_of, since_option
from dynamo_local.cli.arguments.options import namespace_option, paths_of_logs

if TYPE_CHECKING:
    from dynamo_local.core.messages.events import Event

DEFAULT_EVENTS = 100
_LOOK_EVERY_S = 0.2

_KINDS = (
    "server",
    "start",
    "death",
    "scale",
    "planner",
    "role",
    "park",
    "sleep",
    "wake",
    "swap",
    "drain",
    "migration",
    "device",
    "setting",
    "secret",
    "key",
    "endpoint",
)


@click.command()
@namespace_option
@click.option("-f", "--follow", is_flag=True, help="Wait for further events, also of later servers, until interrupted.")
@since_option
@click.option(
    "-n",
    "--number",
    type=click.IntRange(min=0),
    help=f"Number of last events to show.  [default: {DEFAULT_EVENTS}, or all with --since]",
)
@click.option(
    "--kind", "kinds", type=click.Choice(_KINDS), multiple=True, help="Show events of this kind. May be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print each event as a line of JSON.")
def events(
    namespace: str, follow: bool, since: str | None, number: int | None, kinds: tuple[str, ...], as_json: bool
) -> None:
    """Show what has happened to a server, and why.

    Events are starts, deaths, scalings, role changes, drains, migrations, devices that are claimed and freed, changed
    settings and secrets, orders about API keys, and states of endpoints. They are kept after the server has ended.

    \b
    dynamo events -f
    dynamo events --since 10m --kind scale --kind migration
    """
    from dynamo_local.cli.output.event_lines import chosen
    from dynamo_local.core.errors import NotRunningError
    from dynamo_local.supervisor.server.reports.event_log import EventReader
    from state.locks import server_pid

    paths, cutoff = paths_of_logs(namespace), cutoff_of(since)
    reader = EventReader(paths.events_file)
    found = reader.all()
    if not found and not follow and server_pid(paths) is None:
        raise NotRunningError(f"there are no events in namespace {paths.namespace}", "start one: dynamo serve MODEL")
    if number is None:
        number = DEFAULT_EVENTS if since is None else len(found)
    shown = chosen(found, kinds, cutoff)
    _print(shown[max(0, len(shown) - number) :], as_json)
    while follow:
        time.sleep(_LOOK_EVERY_S)
        _print(chosen(reader.new(), kinds, None), as_json)


def _print(found: list[Event], as_json: bool) -> None:
    from datetime import UTC, datetime

    import msgspec

    from dynamo_local.cli.output.event_lines import line_of
    from dynamo_local.core.http.json_text import as_line

    today = datetime.fromtimestamp(time.time(), UTC).astimezone()
    for event in found:
        click.echo(as_line(msgspec.json.encode(event)) if as_json else line_of(event, today), nl=not as_json)
