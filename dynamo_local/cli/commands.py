"""The commands of `dynamo`, by groups, with the line that `dynamo --help` shows for each, and errors of command lines.

A new command is one line here: its name, its module below dynamo_local/cli, and the first paragraph of its docstring.
The module has the command under its name. It is imported when the command is used, so that every command starts fast.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module

import click

from dynamo_local.core.errors import UsageError

INTERRUPTED = 130
"""Exit code of a command that the user interrupted."""
_KINDS = {"integer range": "an integer", "integer": "an integer", "float range": "a number", "float": "a number"}
"""Click's names of types, as in "'x' is not a valid float range" -> what they mean."""

EXAMPLES = """\
Examples:
  dynamo serve Qwen/Qwen3-0.6B --workers 2
  curl http://127.0.0.1:8000/v1/models    the API, in another terminal
  dynamo top                              what each worker does
  dynamo scale VllmWorker=3               three workers
  dynamo logs -f VllmWorker               what they log
  dynamo stop
"""
_PACKAGE = "dynamo_local.cli"


def in_words(error: click.UsageError) -> str:
    """Return cause and remedy of an error in the command line."""
    command = "dynamo" if error.ctx is None else error.ctx.command_path
    see_help = f"see `{command} --help`"
    match error:
        case click.NoSuchOption():
            known = _options(error.ctx)
            return f"there is no option {error.option_name}; {nearest(error.option_name, known) or see_help}"
        case click.MissingParameter(param=click.Parameter() as param, ctx=click.Context() as ctx):
            pieces = ctx.command.collect_usage_pieces(ctx)
            return f"{param.make_metavar(ctx)} is missing; the usage is `{command} {' '.join(pieces)}`"
        case click.BadParameter(param=click.Parameter() as param) if param.type.name in _KINDS:
            cause = error.format_message().replace(f"a valid {param.type.name}", _KINDS[param.type.name])
        case click.BadOptionUsage(ctx=None):
            # Click does not say which command the option belongs to.
            return f"{_sentence(error.format_message())}; `--help` after the command shows its options"
        case _:
            cause = error.format_message()
    return f"{_sentence(cause)}; {see_help}"


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """Return a question with the known names that are similar to the wrong one; None if none is."""
    close = difflib.get_close_matches(wrong, list(known))
    return f"did you mean {' or '.join(close)}?" if close else None


def _options(context: click.Context | None) -> list[str]:
    params = context.command.get_params(context) if context is not None else []
    return [name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")]


def _sentence(message: str) -> str:
    return f"{message[:1].lower()}{message[1:].rstrip('.')}"


@dataclass(frozen=True)
class Entry:
    """A command: its name, its module, and its purpose, which fits on a line of 80 columns beside the name."""

    name: str
    module: str
    purpose: str


GROUPS: dict[str, tuple[Entry, ...]] = {
    "Run": (
        Entry("serve", "serve", "Serve MODEL with workers, a router and the OpenAI API."),
        Entry("run", "run", "Ask MODEL one PROMPT, or start a chat."),
        Entry("chat", "run", "Chat with MODEL, or with the model of the server that runs."),
        Entry("wait", "server", "Wait until a server or an endpoint is ready."),
        Entry("stop", "server", "Stop a running server, or clean up after a crash."),
        Entry("batch", "jobs", "Run a file of requests; list and cancel batches."),
        Entry("task", "jobs", "List, show and cancel asynchronous tasks."),
        Entry("load", "load", "Send requests to an OpenAI endpoint and measure the answers."),
    ),
    "Look": (
        Entry("ls", "look", "Show all servers of this user."),
        Entry("ps", "look", "List the processes of a server, with their states and devices."),
        Entry("top", "top", "Show workers, requests and planner of a server live."),
        Entry("events", "reports", "Show what has happened to a server, and why."),
        Entry("logs", "reports", "Print the logs of all services, or of one SERVICE."),
        Entry("describe", "look", "Show everything known of a process, endpoint or live request."),
        Entry("requests", "requests", "List the requests in flight, with their workers."),
        Entry("route", "look", "Show to which workers the latest requests went, and why."),
        Entry("usage", "look", "Show what requests have used, by API key and endpoint."),
        Entry("queue", "requests", "List or drop the jobs of the prefill queues."),
    ),
    "Change": (
        Entry("scale", "workers", "Set the number of workers of a service or an endpoint."),
        Entry("drain", "workers", "Drain and stop one worker."),
        Entry("restart", "workers", "Restart a service or one worker with no failed requests."),
        Entry("role", "workers", "Change the ROLE of a worker to prefill or decode."),
        Entry("migrate", "requests", "Migrate running requests to another worker."),
        Entry("planner", "planner", "Add and remove workers with the load, until interrupted."),
        Entry("endpoint", "endpoints", "Create, show, change, park, wake and delete endpoints."),
        Entry("key", "keys", "Create, list, rotate and revoke API keys."),
        Entry("config", "server", "Show or change the live settings of a server."),
        Entry("rotate-token", "server", "Replace the token of the bus while requests run."),
    ),
    "Set up": (
        Entry("doctor", "doctor", "Check this machine: finding and remedy for each problem."),
        Entry("completion", "completion", "Print the script that makes SHELL complete `dynamo`."),
    ),
}
"""Groups in the order of `dynamo --help`."""


class CommandGroup(click.Group):
    """A group of commands that suggests the nearest name for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            hint = nearest(name, known) or f"see `{ctx.command_path} --help`"
            raise UsageError(f"there is no command {ctx.command_path} {name}", hint)
        return super().resolve_command(ctx, args)


class LazyGroup(CommandGroup):
    """The commands of a table, listed by groups. `examples` is shown below them as it is."""

    def __init__(self, *, groups: Mapping[str, tuple[Entry, ...]], examples: str, **attributes: object) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]
        self._groups = groups
        self._entries = {entry.name: entry for entries in groups.values() for entry in entries}
        self._examples = examples

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (entry := self._entries.get(cmd_name)) is None:
            return None
        command = getattr(import_module(f"{_PACKAGE}.{entry.module}"), entry.name.replace("-", "_"))
        assert isinstance(command, click.Command), f"{entry.module} has no command {entry.name}"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self._entries))
        for title, entries in self._groups.items():
            with formatter.section(title):
                formatter.write_dl([(entry.name.ljust(width), entry.purpose) for entry in entries])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{self._examples}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[click.shell_completion.CompletionItem]:
        """Complete without importing the commands, which would make each press of the tab key slow."""
        from click.shell_completion import CompletionItem

        fitting = [entry for entry in self._entries.values() if entry.name.startswith(incomplete)]
        items = [CompletionItem(entry.name, help=entry.purpose) for entry in fitting]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]
