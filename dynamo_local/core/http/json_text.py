"""JSON as clients send it: in UTF-8, or, as Python's reader takes it, in UTF-16 or UTF-32, with or without a mark."""

from __future__ import annotations

import json


def as_utf8(body: bytes) -> bytes:
    """The text in UTF-8 without a byte order mark. Raises UnicodeDecodeError."""
    if body[:1] == b"{" and body[1:2] > b"\0":
        return body
    encoding = json.detect_encoding(body)
    return body if encoding == "utf-8" else body.decode(encoding).encode()


def why_not(body: bytes, error: Exception) -> str:
    """Explain why a text in UTF-8 could not be read, with a hint where other readers are more lenient."""
    folded = body.lower()
    if b"\\ud" in folded:
        return f"{error} (\\ud800 to \\udfff stand for nothing but in pairs)"
    if b"nan" in folded or b"infinity" in folded:
        return f"{error} (JSON has no NaN and no Infinity)"
    return str(error)
