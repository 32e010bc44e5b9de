"""A chat as the user sees it: what was said so far, commands, and text that is safe to show. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and line feed. By them a model's text could rewrite the screen, or the clipboard."""

COMMANDS = {
    "/clear": "forget what was said so far",
    "/system": "set the system prompt to the rest of the line; without it, remove the system prompt",
    "/help": "show this list",
    "/exit": "end the chat (also Ctrl-D)",
}
"""The commands of a chat, each with its meaning."""


@dataclass(frozen=True)
class Conversation:
    """What was said so far: questions and answers in turn, after the system prompt."""

    system: str | None = None
    turns: tuple[tuple[str, str], ...] = ()
    """Role ("user" or "assistant") and text of each message."""

    def asked(self, prompt: str) -> Conversation:
        return replace(self, turns=(*self.turns, ("user", prompt)))

    def answered(self, text: str) -> Conversation:
        return replace(self, turns=(*self.turns, ("assistant", text)))

    def cleared(self) -> Conversation:
        return replace(self, turns=())

    def messages(self) -> list[dict[str, str]]:
        """The messages of a chat request."""
        system = [] if self.system is None else [("system", self.system)]
        return [{"role": role, "content": text} for role, text in (*system, *self.turns)]


def parse_command(line: str) -> tuple[str, str] | None:
    """The command of a line and the rest of the line; None if the line is a question. Unknown commands are returned as
    well. A path such as /etc/hosts begins a question."""
    word, _, rest = line.strip().partition(" ")
    if not word.startswith("/") or "/" in word[1:]:
        return None
    return word, rest.strip()


def printable(text: str) -> str:
    """The text without control characters, for a terminal."""
    return _CONTROL.sub("", text)
