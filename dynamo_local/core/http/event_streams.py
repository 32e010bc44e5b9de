"""Server-sent events that are written before, or instead of, those of the OpenAI server. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

_DONE = b"data: [DONE]\n\n"


def comment(text: str) -> bytes:
    """Return a comment, which clients skip."""
    return f": {' '.join(text.split())}\n\n".encode()


def error_event(path: str, body: bytes) -> bytes:
    """Return the event for an error in a stream that has begun, as the API at this path has them.

    `body`: what the answer would be otherwise, in OpenAI's error shape, or in that of the API at this path.
    """
    error = _error_in(body)
    if path == "/v1/messages":
        return _named_error({"type": "error", "error": {"type": error.get("type"), "message": error.get("message")}})
    if path == "/v1/responses":
        content = {"code": str(error.get("code", "")), "message": error.get("message"), "param": error.get("param")}
        return _named_error({"type": "error", "sequence_number": 0, **content})
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n" + _DONE


def _named_error(content: dict[str, Any]) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(content) + b"\n\n"


def _error_in(body: bytes) -> dict[str, Any]:
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        error = None
    if isinstance(error, dict):
        return error
    message = body.decode(errors="replace").strip() or "the server has given no answer"
    return {"message": message, "type": "InternalServerError", "param": None, "code": 500}
