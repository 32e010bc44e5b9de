"""A chat's messages, commands, and text for a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.conversation import Conversation, parse_command, printable


def test_messages_are_the_system_prompt_and_the_turns() -> None:
    conversation = Conversation("Be brief").asked("Hi").answered("Hello").asked("Bye")
    assert [(message["role"], message["content"]) for message in conversation.messages()] == [
        ("system", "Be brief"),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Bye"),
    ]
    assert conversation.cleared() == Conversation("Be brief")
    assert Conversation().messages() == []


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/clear", ("/clear", "")),
        (" /system  Be brief ", ("/system", "Be brief")),
        ("/nosuch x", ("/nosuch", "x")),
        ("/etc/hosts is what?", None),
        ("what is /clear", None),
        ("", None),
    ],
)
def test_lines_that_begin_with_a_slash_are_commands(line: str, command: tuple[str, str] | None) -> None:
    assert parse_command(line) == command


@given(st.text())
def test_what_is_shown_has_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert not any((ord(sign) < 32 and sign not in "\n\t") or 127 <= ord(sign) < 160 for sign in shown)
    assert printable(shown) == shown


def test_ordinary_text_stays() -> None:
    assert printable("a\tb\nü 漢 🙂\x1b[2J") == "a\tb\nü 漢 🙂[2J"
