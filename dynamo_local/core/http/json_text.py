"""JSON as clients send it and read it. Pure.

It comes in UTF-8, or, as Python's reader takes it, in UTF-16 or UTF-32, with or without a mark. Its values are read as
pydantic reads them in the server behind, which takes strings for booleans and numbers.
"""

from __future__ import annotations

import json
import re
from typing import Any

_TRUE, _FALSE = frozenset({"1", "t", "true", "y", "yes", "on"}), frozenset({"0", "f", "false", "n", "no", "off"})

_NUMBER_TEXT = re.compile(r"[ \t\n\r]*([+-]?[0-9]{1,18})(\.0{1,18})?[ \t\n\r]*")
"""A string that pydantic takes for a whole number. It takes others as well, which are none here."""

_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}
"""Characters that JSON need not escape, and at which Python's `str.splitlines` ends a line."""


def as_utf8(body: bytes) -> bytes:
    """The text in UTF-8 without a byte order mark. Raises UnicodeDecodeError."""
    if body[:1] == b"{" and body[1:2] > b"\0":
        return body
    encoding = json.detect_encoding(body)
    return body if encoding == "utf-8" else body.decode(encoding).encode()


def as_line(text: bytes) -> bytes:
    """Return a JSON text as a line, with its line feed, that readers of lines leave whole. `text`: in UTF-8, without a
    line feed."""
    for end, escaped in _LINE_ENDS.items():
        if end in text:
            text = text.replace(end, escaped)
    return text + b"\n"


def why_not(body: bytes, error: Exception) -> str:
    """Explain why a text in UTF-8 could not be read, with a hint where other readers are more lenient."""
    folded = body.lower()
    if b"\\ud" in folded:
        return f"{error} (\\ud800 to \\udfff stand for nothing but in pairs)"
    if b"nan" in folded or b"infinity" in folded:
        return f"{error} (JSON has no NaN and no Infinity)"
    return str(error)


def boolean(value: Any) -> bool | None:
    """Return a value as pydantic takes it for a boolean; None: it is none, or not given."""
    if isinstance(value, str):
        text = value.lower() if value.isascii() else ""
        return True if text in _TRUE else False if text in _FALSE else None
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def whole_number(value: Any) -> int | None:
    """Return a value as pydantic takes it for a whole number; None: it is none, or not given."""
    if isinstance(value, str):
        found = _NUMBER_TEXT.fullmatch(value)
        return None if found is None else int(found[1])
    return int(value) if isinstance(value, int | float) and value % 1 == 0 else None
