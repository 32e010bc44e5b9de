"""`dynamo logs`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from dynamo_local.cli.options import namespace_option, paths_of

if TYPE_CHECKING:
    from dynamo_local.supervisor.server.logs import Follower
    from state.paths import StatePaths

DEFAULT_LINES = 100
_LOOK_EVERY_S = 0.2


@click.command()
@click.argument("service", required=False)
@namespace_option
@click.option("-f", "--follow", is_flag=True, help="Follow the logs until the server ends.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    default=DEFAULT_LINES,
    show_default=True,
    help="Number of last lines to show of each log.",
)
def logs(service: str | None, namespace: str, follow: bool, lines: int) -> None:
    """Show the logs of all services, or of SERVICE.

    SERVICE is the name of a service or watcher, Nats or circusd. Logs are kept after the server has ended.
    """
    from dynamo_local.core.errors import NotRunningError
    from dynamo_local.supervisor.server.logs import Follower, select
    from state.locks import server_pid

    paths = paths_of(namespace)
    names = select(paths.logs_dir, service)
    if not names and server_pid(paths) is None:
        raise NotRunningError(f"there are no logs in namespace {namespace}", "start a server with `dynamo serve`")
    followers = {name: Follower(paths.log_file(name)) for name in names}
    prefixed = service is None or len(names) > 1
    for name, follower in followers.items():
        _print(name, follower.last_lines(lines), prefixed)
    if follow:
        _follow(paths, service, followers, prefixed)


def _follow(paths: StatePaths, service: str | None, followers: dict[str, Follower], prefixed: bool) -> None:
    from dynamo_local.supervisor.server.logs import Follower, select
    from state.locks import server_pid

    running = True
    while running:
        # Before the logs are read, so that the last lines of a server that ends meanwhile are read too.
        running = server_pid(paths) is not None
        for name in select(paths.logs_dir, service):
            follower = followers.setdefault(name, Follower(paths.log_file(name)))
            _print(name, follower.new_lines(), prefixed)
        time.sleep(_LOOK_EVERY_S if running else 0)


def _print(name: str, lines: list[str], prefixed: bool) -> None:
    for line in lines:
        click.echo(f"{name} | {line}" if prefixed else line)
