"""The terminal of a chat: lines with editing and history, answers as they arrive."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dynamo_local.core.conversation import printable

if TYPE_CHECKING:
    from dynamo_local.chat.answer import Part

_PROMPT = ">>> "
_DIM, _PLAIN = "\033[2m", "\033[0m"


class Terminal:
    """A screen (chat/session.py) on standard input and output. Notes go to standard error.

    A model's reasoning is shown on a terminal only, dimmed, so that a program that reads the output gets the answer
    alone.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_dim = False
        self._ends_line = True

    def read(self) -> str:
        with suppress(ImportError):
            # Imported for its effect: `input` edits lines and has a history.
            import readline  # noqa: F401
        try:
            return input(_PROMPT)
        except (EOFError, KeyboardInterrupt):
            click.echo()
            raise

    def show(self, part: Part) -> None:
        if not self._is_terminal:
            if not part.is_reasoning:
                self._write(part.text)
            return
        if part.is_reasoning != self._is_dim:
            # The answer begins below the thoughts.
            self._write(f"{_DIM}" if part.is_reasoning else f"{_PLAIN}\n\n")
            self._is_dim = part.is_reasoning
        self._write(printable(part.text))

    def end_answer(self) -> None:
        if self._is_dim:
            self._write(_PLAIN)
            self._is_dim = False
        if not self._ends_line:
            self._write("\n")

    def note(self, text: str) -> None:
        if text:
            click.echo(text, err=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._ends_line = text.endswith("\n") or (self._ends_line and text in (_DIM, _PLAIN, ""))
