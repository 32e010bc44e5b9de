"""The messages that the page on troubleshooting quotes are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = ("dynamo_local", "components", "state", "scripts")
GAP = "\0"
"""Stands for a value in an f-string, which the page writes as `...`."""


def quoted(page: str) -> list[str]:
    """The code in the first column of tables whose first column is headed "message" or "status and message"."""
    found, in_table = [], False
    for line in page.splitlines():
        if not line.startswith("|"):
            in_table = False
        elif re.match(r"\| (status and )?message", line):
            in_table = True
        elif in_table:
            found += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    # An error that the command line shows, a path of the machine: neither is a message of the code.
    return [text for text in found if not text.startswith(("error: ", "/", "Retry-After"))]


def fragments(message: str) -> list[str]:
    """The parts of a quoted message that stand in one text of the code: between gaps, and on either side of the
    `;` between cause and remedy."""
    parts = (part.strip() for part in re.split(r"\.\.\.|; ", message))
    return [part for part in parts if len(part) > 3]


@cache
def texts() -> tuple[str, ...]:
    """Every text in the code, in one line each."""
    files = (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    return tuple(" ".join(text.split()) for path in files for text in _texts(ast.parse(path.read_text())))


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
            yield "".join(part for part in parts if isinstance(part, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sdg]|%\.\d+[fs]", GAP, node.value)


@pytest.mark.parametrize("message", quoted(PAGE.read_text()))
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    wanted = fragments(message)
    assert wanted
    assert [part for part in wanted if not any(part in text for text in texts())] == []


def test_messages_are_found_and_missing_ones_noticed() -> None:
    assert len(quoted(PAGE.read_text())) > 50
    page = "| message | do |\n|---|---|\n| `a ... b; c` | `d` |\n\n| you see | do |\n|---|---|\n| `e` | |\n"
    assert quoted(page) == ["a ... b; c"]
    assert fragments("no server runs in namespace ...; see") == ["no server runs in namespace"]
    assert not any("no text of the " + "code" in text for text in texts())
