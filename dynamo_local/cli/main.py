"""Entry point of the `dynamo` command. Errors become one line on standard error and an exit code here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from dynamo_local import __version__
from dynamo_local.cli.commands import EXAMPLES, GROUPS, INTERRUPTED, LazyGroup, in_words
from dynamo_local.core.errors import DynamoError, UsageError

EXIT_CODES = {
    0: "The command has done what was asked.",
    DynamoError.exit_code: "The command failed. An error is one line on standard error, with its cause and a remedy.",
    UsageError.exit_code: "The command line or the configuration is wrong, or the server is not in the state that the "
    "command needs. Nothing was started or changed.",
    INTERRUPTED: "The user interrupted the command (Ctrl-C). `planner` and `top` end with 0 instead, and so "
    "does `serve` once it has been ready.",
}
"""Exit codes of all commands, each with its meaning."""


@click.group(cls=LazyGroup, groups=GROUPS, examples=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dynamo")
def dynamo() -> None:
    """Serve language models on one machine: several vLLM workers behind one OpenAI API."""


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        # Settings and messages between processes name folders in UTF-8: here, nothing could be opened by such a name.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line, and return the exit code. An error is printed as one line on standard error."""
    try:
        code = dynamo.main(list(arguments), prog_name="dynamo", standalone_mode=False)
        sys.stdout.flush()
    except DynamoError as error:
        return _refuse(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.UsageError as error:
        return _refuse(in_words(error), error.exit_code)
    except click.ClickException as error:
        return _refuse(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has gone, as `head` does. Python would fail once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code if isinstance(code, int) else 0


def _refuse(message: str, code: int) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    main()
