"""The page on the command line, from the tree of click commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence

import click

from dynamo_local.cli.main import EXIT_CODES, dynamo
from scripts.reference import markdown

_TYPES = {"integer": "int", "integer range": "int", "float range": "float", "text": "str"}
"""Names of click's types -> names that the page on configuration uses."""

_WIDTH = 200
"""Characters that the summary of a command may have."""

_DEFAULT = re.compile(r"\s*\[default: ([^]]*)\]")
_ENVIRONMENT = re.compile(r"\s*\[env: ([^]]*)\]")
"""Parts of a help text for what click cannot know: a default or a variable that is read later."""


def page() -> str:
    """The text of docs/reference/cli.md."""
    contexts = list(walk(context_of(dynamo, "dynamo")))
    return markdown.page("Command line", [_index(contexts), *map(_section, contexts), _exit_codes()])


def context_of(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    """The context in which click shows the help of a command."""
    return click.Context(command, parent=parent, info_name=name, **command.context_settings)


def walk(context: click.Context) -> Iterator[click.Context]:
    """The command of the context and all commands below it, each in its context."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None, "a listed command exists"
            yield from walk(context_of(command, name, context))


def options_of(context: click.Context) -> list[click.Option]:
    """The options of a command, without --help, which every command has."""
    params = [param for param in context.command.get_params(context) if isinstance(param, click.Option)]
    return [param for param in params if not {*param.opts} & {*context.help_option_names}]


def arguments_of(context: click.Context) -> list[click.Argument]:
    """The positional arguments of a command."""
    return [param for param in context.command.get_params(context) if isinstance(param, click.Argument)]


def _index(contexts: list[click.Context]) -> str:
    rows = [
        (f"[{path}](#{path.replace(' ', '-')})", context.command.get_short_help_str(_WIDTH))
        for context in contexts[1:]
        for path in [context.command_path]
    ]
    return markdown.table(("command", "purpose"), rows)


def _section(context: click.Context) -> str:
    usage = " ".join([context.command_path, *context.command.collect_usage_pieces(context)])
    parts = [f"## {context.command_path}", markdown.fenced(usage), *_paragraphs(context.command)]
    if arguments := arguments_of(context):
        parts.append(markdown.table(("argument", "type", "number"), map(_argument_row, arguments)))
    if options := options_of(context):
        rows = [_option_row(option, context) for option in options]
        parts.append(markdown.table(("option", "type", "default", "meaning"), rows))
    if context.parent is None:
        parts.append("Every command has `-h` and `--help`, which print its usage.")
    return "\n\n".join(parts)


def _paragraphs(command: click.Command) -> Iterator[str]:
    """The help text of a command. As in click, a paragraph below a backspace is not wrapped."""
    for part in inspect.cleandoc(command.help or "").split("\n\n"):
        shown = part.removeprefix("\b\n")
        yield markdown.paragraph(part) if shown == part else markdown.fenced(shown)


def _argument_row(argument: click.Argument) -> tuple[str, str, str]:
    number = {(True, 1): "1", (False, 1): "0 or 1", (True, -1): "1 or more", (False, -1): "any"}
    name = markdown.code(argument.human_readable_name)
    return name, _type(argument), number[argument.required, argument.nargs]


def _option_row(option: click.Option, context: click.Context) -> tuple[str, str, str, str]:
    help = option.help or ""
    variables = [*_texts(option.envvar), *(name for names in _ENVIRONMENT.findall(help) for name in names.split(", "))]
    meaning = _ENVIRONMENT.sub("", _DEFAULT.sub("", help))
    if variables:
        meaning += f" Environment: {markdown.codes(variables)}."
    return _spelling(option, context), _type(option), _default(option), meaning


def _spelling(option: click.Option, context: click.Context) -> str:
    names = markdown.codes(option.opts)
    if option.secondary_opts:
        return f"{names}, {markdown.codes(option.secondary_opts)}"
    if option.is_flag or option.metavar is None:
        return names
    return f"{names} {markdown.code(option.make_metavar(context))}"


def _type(param: click.Parameter) -> str:
    kind = param.type
    if isinstance(param, click.Option) and param.is_flag:
        return "flag"
    if isinstance(kind, click.Choice):
        return f"one of {markdown.codes(kind.choices)}"
    name = _TYPES.get(kind.name, kind.name)
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return name
    above, at_least = (kind.min, None) if kind.min_open else (None, kind.min)
    return f"{name}{markdown.bounds(at_least, above, kind.max)}"


def _default(option: click.Option) -> str:
    if told := _DEFAULT.search(option.help or ""):
        return told[1]
    value = option.to_info_dict()["default"]
    if value is None or (option.is_flag and not option.secondary_opts):
        return ""
    if option.secondary_opts:
        return markdown.code((option.opts if value else option.secondary_opts)[0])
    return markdown.code(value)


def _texts(value: str | Sequence[str] | None) -> list[str]:
    """A text or several, as click has names of variables."""
    return [value] if isinstance(value, str) else list(value or ())


def _exit_codes() -> str:
    rows = [(markdown.code(number), meaning) for number, meaning in EXIT_CODES.items()]
    return f"## Exit codes\n\n{markdown.table(('code', 'meaning'), rows)}"
