"""Markdown, and words that both pages share."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

HEADER = "<!-- Generated from the code by `make reference`. Do not edit. -->"
_WIDTH = 120


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page."""
    return "\n\n".join([f"# {title}", HEADER, *parts]) + "\n"


def part(text: str) -> str:
    """Return a heading or a table as it is, and other text as a paragraph."""
    return text if text.startswith(("#", "|")) else paragraph(text)


def paragraph(text: str) -> str:
    """Return the text as one paragraph, wrapped at the line length."""
    return textwrap.fill(" ".join(text.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. Cells may contain any text."""
    lines = [headers, ["---"] * len(headers), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def fenced(text: str) -> str:
    """Text that is shown as it is."""
    return f"```\n{text}\n```"


def code(value: object) -> str:
    """A value or name in code style. Text as it is, booleans and null as YAML spells them."""
    return f"`{_plain(value)}`"


def codes(values: Iterable[object]) -> str:
    """Several values, separated by commas."""
    return ", ".join(map(code, values))


def bounds(at_least: float | None, above: float | None, at_most: float | None) -> str:
    """The allowed range in words, with a leading comma; nothing if there is none."""
    if at_least is not None and at_most is not None:
        return f", {at_least:.12g} to {at_most:.12g}"
    limits = {"at least": at_least, "above": above, "at most": at_most}
    return "".join(f", {words} {limit:.12g}" for words, limit in limits.items() if limit is not None)


def _plain(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
