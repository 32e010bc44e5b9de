"""`dynamo logs`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.age import cutoff_of, since_option
from dynamo_local.cli.arguments.options import namespace_option, paths_of_logs
from dynamo_local.cli.output.log_lines import LEVELS, Repeats, Selection, level_of
from dynamo_local.core.names import short_watcher

if TYPE_CHECKING:
    from state.paths import StatePaths

DEFAULT_LINES = 100
_MOST_LINES = 1_000_000
_LOOK_EVERY_S = 0.2
_COLOURS = {2: "yellow", 3: "red"}
"""Colours of levels, on a terminal only."""


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of commands that print logs: follow, lines, since, level."""
    options = (
        click.option("-f", "--follow", is_flag=True, help="Follow the logs until the server ends."),
        click.option(
            "-n",
            "--lines",
            type=click.IntRange(min=0),
            help=f"Number of last lines to show of each log.  [default: {DEFAULT_LINES}, or all with --since]",
        ),
        since_option,
        click.option("--level", type=click.Choice(LEVELS), help="Show lines of this level and above."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("service", required=False, shell_complete=completion_values.logs)
@namespace_option
@log_options
def logs(
    service: str | None, namespace: str, follow: bool, lines: int | None, since: str | None, level: str | None
) -> None:
    """Print the logs of all services, or of one SERVICE.

    SERVICE is the name of a service or watcher, of an endpoint or one of its revisions, Nats or circusd. Logs are kept
    after the server has ended; those of other nodes are there. With -f, a line that is repeated is shown once, with a
    number.

    \b
    dynamo logs -f                  follow all logs
    dynamo logs VllmWorker -n 20    the last 20 lines of each worker
    dynamo logs chat                the workers of endpoint chat; chat@2: of its second revision
    """
    from dynamo_local.supervisor.server.reports.logs import select

    paths = paths_of_logs(namespace)
    shown = Shown(follow, lines, since, level, prefixed=service is None)
    show_of_all_nodes(paths, service, lambda: select(paths.logs_dir, service), shown)


@dataclass(frozen=True)
class Shown:
    """What is shown, by the options of `dynamo logs`. `prefixed`: each line begins with the name of its log, as it does
    anyway if there are several."""

    follow: bool
    lines: int | None
    since: str | None
    level: str | None
    prefixed: bool = True


def show_of_all_nodes(paths: StatePaths, selector: str | None, here: Callable[[], Sequence[str]], shown: Shown) -> None:
    """Print the logs that `here` names, which raises NotRunningError if there is none, and those on other nodes that
    the selector selects."""
    from dynamo_local.control.client import ControlClient
    from dynamo_local.core.errors import NotRunningError
    from dynamo_local.supervisor.server.reports.logs import FarFollower, Follower, select_far
    from state.locks import server_pid

    client = ControlClient(paths)

    def choose() -> Sequence[str]:
        others = select_far(paths, selector)
        try:
            return (*here(), *others)
        except NotRunningError:
            # Its processes may all be on other nodes.
            if others:
                return others
            raise

    def reader(name: str) -> Lines:
        return FarFollower(client, name) if name in select_far(paths, None) else Follower(paths.log_file(name))

    if not choose() and server_pid(paths) is None:
        raise NotRunningError(f"there are no logs in namespace {paths.namespace}", "start one: dynamo serve MODEL")
    _show(paths, choose, reader, shown)


def _show(
    paths: StatePaths, choose: Callable[[], Sequence[str]], reader: Callable[[str], Lines], options: Shown
) -> None:
    """Print the logs that `choose` names. `reader`: reads the log of that name."""
    cutoff, names = cutoff_of(options.since), choose()
    prefixed = options.prefixed or len(names) > 1

    def log_of(name: str) -> _Log:
        return _Log(name, reader(name), Selection(cutoff, options.level), Repeats(), prefixed)

    lines = options.lines
    if lines is None:
        lines = DEFAULT_LINES if options.since is None else _MOST_LINES
    shown = {name: log_of(name) for name in names}
    for log in shown.values():
        log.show_last(lines, everything=options.since is not None or options.level is not None)
    if options.follow:
        _follow(paths, choose, shown, log_of)


class Lines(Protocol):
    """Reads a log as it grows (supervisor.server.reports.logs.Follower)."""

    def last_lines(self, lines: int) -> list[str]: ...
    def new_lines(self) -> list[str]: ...


@dataclass(frozen=True)
class _Log:
    """The log of a service: its new lines, which of them are wanted, and which repeat the last one."""

    name: str
    follower: Lines
    selection: Selection
    repeats: Repeats
    prefixed: bool

    def show_last(self, lines: int, *, everything: bool) -> None:
        """Show the last lines. `everything`: the whole log is to be searched for them."""
        found = self.selection.of(self.follower.last_lines(_MOST_LINES if everything else lines))
        self._print(found[max(0, len(found) - lines) :])

    def show_new(self) -> None:
        self._print(self.repeats.of(self.selection.of(self.follower.new_lines())))

    def show_end(self) -> None:
        self._print(self.repeats.end())

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            text = click.style(line, fg=_COLOURS.get(level_of(line) or 0))
            # click leaves colours out where the output is no terminal.
            click.echo(f"{click.style(short_watcher(self.name), fg='cyan')} | {text}" if self.prefixed else text)


def _follow(
    paths: StatePaths, choose: Callable[[], Sequence[str]], shown: dict[str, _Log], log_of: Callable[[str], _Log]
) -> None:
    from state.locks import server_pid

    running = True
    while running:
        # Before the logs are read, so that the last lines of a server that ends meanwhile are read too.
        running = server_pid(paths) is not None
        for name in choose():
            if name not in shown:
                shown[name] = log_of(name)
            shown[name].show_new()
        time.sleep(_LOOK_EVERY_S if running else 0)
    for log in shown.values():
        log.show_end()
