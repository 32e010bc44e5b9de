"""Groups of commands. An unknown name is answered with the nearest ones; `dynamo` imports a command when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click

from dynamo_local.cli.commands import Entry
from dynamo_local.cli.usage_errors import nearest
from dynamo_local.core.errors import UsageError

_PACKAGE = "dynamo_local.cli"


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
