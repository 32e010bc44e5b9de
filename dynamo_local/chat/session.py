"""The interactive chat: reads questions, shows answers, keeps what was said."""

from __future__ import annotations

import asyncio
from typing import Protocol

from dynamo_local.chat.client import AnswerReader, ChatClient, ChatError, Part, reader
from dynamo_local.core.conversation import COMMANDS, Conversation, parse_command

_HINT = "Ctrl-C again, Ctrl-D or /exit ends the chat"


class Screen(Protocol):
    """The user's terminal."""

    def read(self) -> str:
        """The next line of the user. Raises EOFError at the end of the input, and KeyboardInterrupt."""

    def show(self, part: Part) -> None:
        """Show a part of an answer."""

    def end_answer(self) -> None:
        """The answer is complete, or was interrupted."""

    def note(self, text: str) -> None:
        """Show a line that is not part of an answer."""


class Session:
    """A chat with one model. `is_verbose`: show the figures of each answer."""

    def __init__(self, client: ChatClient, screen: Screen, conversation: Conversation, *, is_verbose: bool) -> None:
        self._client, self._screen, self._is_verbose = client, screen, is_verbose
        self._conversation = conversation

    def run(self) -> bool:
        """Chat until the user ends it. Returns whether the user interrupted it (Ctrl-C twice)."""
        # One event loop for all answers, so that connections are reused. It does not run while a line is read, so
        # Ctrl-C raises KeyboardInterrupt there; while it runs, Ctrl-C cancels the answer.
        with asyncio.Runner() as runner:
            try:
                return self._run(runner)
            finally:
                runner.run(self._close())

    def _run(self, runner: asyncio.Runner) -> bool:
        was_interrupted = False
        while True:
            try:
                line = self._screen.read()
            except EOFError:
                return False
            except KeyboardInterrupt:
                if was_interrupted:
                    return True
                was_interrupted = True
                self._screen.note(_HINT)
                continue
            was_interrupted = False
            command = parse_command(line)
            if command is None:
                was_interrupted = bool(line.strip()) and self._ask(runner, line)
            elif not self._obey(*command):
                return False

    async def _close(self) -> None:
        self._client.close()

    def _obey(self, command: str, rest: str) -> bool:
        """Do what a command says. Returns False if it ends the chat."""
        if command == "/exit":
            return False
        if command == "/clear":
            self._conversation = self._conversation.cleared()
            self._screen.note("forgotten")
        elif command == "/system":
            self._conversation = Conversation(rest or None, self._conversation.turns)
            self._screen.note("system prompt set" if rest else "system prompt removed")
        else:
            known = command in COMMANDS
            self._screen.note("" if known else f"there is no command {command}; there are:")
            for name, meaning in COMMANDS.items():
                self._screen.note(f"  {name:8} {meaning}")
        return True

    def _ask(self, runner: asyncio.Runner, question: str) -> bool:
        """Ask, and show the answer. Returns whether the user interrupted it: what was shown then counts as answer."""
        asked = self._conversation.asked(question)
        said: list[str] = []
        figures = reader()
        was_interrupted = False
        try:
            runner.run(self._answer(asked, said, figures))
        except KeyboardInterrupt:
            was_interrupted = True
        except ChatError as error:
            self._screen.end_answer()
            self._screen.note(f"error: {error}")
            # Not kept: the next question would fail for the same reason, such as a context that is too long.
            return False
        self._screen.end_answer()
        if said:
            self._conversation = asked.answered("".join(said))
        if self._is_verbose:
            self._screen.note(figures.figures())
        return was_interrupted

    async def _answer(self, asked: Conversation, said: list[str], figures: AnswerReader) -> None:
        async for part in self._client.stream(asked, figures):
            self._screen.show(part)
            if not part.is_reasoning:
                said.append(part.text)
