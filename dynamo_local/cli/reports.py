"""`dynamo events` and `dynamo logs`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

import click

from dynamo_local.cli import completion
from dynamo_local.cli.options import cutoff_of, namespace_option, paths_of_logs, since_option, together
from dynamo_local.core.messages.reports import EVENT_KINDS, Event
from dynamo_local.core.names import short_watcher

if TYPE_CHECKING:
    from state.paths import StatePaths

WATCHER_WIDTH = 16
"""Width of the column of watchers and endpoints. A longer name moves the rest of its line."""

_SERVER = "-"

DEFAULT_EVENTS = 100
_LOOK_EVERY_S = 0.2
LEVELS = ("debug", "info", "warning", "error")
_TIME = re.compile(r"^\D{0,40}?(?:\[\d+\] )?(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)")
_LEVEL = re.compile(r"(?:\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\[(DBG|INF|WRN|ERR|FTL)\])")
_LEVEL_WITHIN = 60
"""Number of characters at the beginning of a line within which its level stands."""
_RANKS = {
    **{"DEBUG": 0, "DBG": 0, "INFO": 1, "INF": 1, "WARNING": 2, "WRN": 2},
    **{"ERROR": 3, "ERR": 3, "CRITICAL": 3, "FTL": 3},
}
_CHANGING = re.compile(r"^\D{0,40}?(?:\[\d+\] )?[\d/: ,.T-]{8,27}")
DEFAULT_LINES = 100
_MOST_LINES = 1_000_000
_COLOURS = {2: "yellow", 3: "red"}
"""Colours of levels, on a terminal only."""


def chosen(events: Iterable[Event], kinds: Collection[str], cutoff: float | None) -> list[Event]:
    """Return the events of these kinds (none: all) since the cutoff (Unix time; None: all)."""
    return [
        event for event in events if (not kinds or event.kind in kinds) and (cutoff is None or event.time >= cutoff)
    ]


def line_of(event: Event, today: datetime) -> str:
    """Return an event as one line: local time, watcher or endpoint, what happened, and why in brackets. Times of other
    days than `today` have their date."""
    at = datetime.fromtimestamp(event.time).astimezone()
    time = f"{at:%H:%M:%S}" if at.date() == today.date() else f"{at:%Y-%m-%d %H:%M:%S}"
    what = event.what if event.request is None else f"{event.request} {event.what}"
    why = f" ({event.why})" if event.why else ""
    line = f"{time}  {_subject(event):{WATCHER_WIDTH}}  {what}{why}"
    return " ".join(line.splitlines())


def _subject(event: Event) -> str:
    return short_watcher(event.watcher) if event.watcher else event.endpoint or _SERVER


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
    "--kind",
    "kinds",
    type=click.Choice(tuple(EVENT_KINDS)),
    multiple=True,
    help="Show events of this kind. May be repeated.",
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
    _print_events(shown[max(0, len(shown) - number) :], as_json)
    while follow:
        time.sleep(_LOOK_EVERY_S)
        _print_events(chosen(reader.new(), kinds, None), as_json)


def _print_events(found: list[Event], as_json: bool) -> None:
    from datetime import UTC

    import msgspec

    from dynamo_local.core.http.json_text import as_line

    today = datetime.fromtimestamp(time.time(), UTC).astimezone()
    for event in found:
        click.echo(as_line(msgspec.json.encode(event)) if as_json else line_of(event, today), nl=not as_json)


def level_of(line: str) -> int | None:
    """Return the rank of a line's level in `LEVELS`; None if it has none."""
    if line.startswith("error: "):
        return 3
    match = _LEVEL.search(line, 0, _LEVEL_WITHIN)
    return None if match is None else _RANKS[match[1] or match[2]]


def time_of(line: str) -> float | None:
    """Return the Unix time of a line, in seconds; None if it has none."""
    match = _TIME.match(line)
    if match is None:
        return None
    try:
        return datetime(*map(int, match.groups())).astimezone().timestamp()  # type: ignore[arg-type]  # six numbers
    except ValueError:
        return None


@dataclass
class Selection:
    """Selects the lines of one log by their age and level. `cutoff` is Unix time, in seconds; None: no bound."""

    cutoff: float | None = None
    level: str | None = None
    _time: float | None = field(default=None, init=False)
    _level: int | None = field(default=None, init=False)

    def of(self, lines: Iterable[str]) -> list[str]:
        """Return the lines to show, which follow on those of the last call."""
        return [line for line in lines if self._keeps(line)]

    def _keeps(self, line: str) -> bool:
        level, time = level_of(line), time_of(line)
        self._level = self._level if level is None else level
        self._time = self._time if time is None else time
        least = 0 if self.level is None else LEVELS.index(self.level)
        # What has no level or time yet is shown only if nothing is asked for.
        recent = self.cutoff is None or (self._time is not None and self._time >= self.cutoff)
        return recent and (least == 0 or (self._level is not None and self._level >= least))


@dataclass
class Repeats:
    """Replaces lines of one log that repeat the previous one, but for the time, by their number."""

    _last: str = field(default="", init=False)
    _times: int = field(default=0, init=False)

    def of(self, lines: Iterable[str]) -> list[str]:
        """Return the lines to show. A number follows once another line comes."""
        shown: list[str] = []
        for line in lines:
            message = _CHANGING.sub("", line)
            if message and message == self._last:
                self._times += 1
                continue
            shown += [*self.end(), line]
            self._last = message
        return shown

    def end(self) -> list[str]:
        """Return the number of the repeated lines that were not shown, as a line; nothing if there are none."""
        times, self._times = self._times, 0
        return [f"(the last line {times} more {'time' if times == 1 else 'times'})"] if times else []


log_options = together(
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
"""The options of commands that print logs: follow, lines, since, level."""


@click.command()
@click.argument("service", required=False, shell_complete=completion.logs)
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
