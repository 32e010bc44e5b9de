"""Click's errors about a command line, in one line with cause and remedy, as all errors of `dynamo`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import click

_KINDS = {"integer range": "an integer", "integer": "an integer", "float range": "a number", "float": "a number"}
"""Click's names of types, as in "'x' is not a valid float range" -> what they mean."""


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
