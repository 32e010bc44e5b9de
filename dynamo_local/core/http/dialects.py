"""Errors as the API at a path has them, in an answer or as an event of a stream that has begun. Pure.

Errors are made in OpenAI's shape, {"error": {message, type, param, code}}, and change it on their way to the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

_DONE = b"data: [DONE]\n\n"

_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)
"""Types of errors by status. All others are `invalid_request_error` below 500, and `api_error` from there on."""


class _Dialect(NamedTuple):
    """How an API tells errors. `answer`: the body of an answer with this status and error; None: OpenAI's. `event`: the
    same in a stream."""

    answer: Callable[[int, dict[str, Any]], dict[str, Any]] | None
    event: Callable[[int, dict[str, Any]], bytes]


def _anthropic(status: int, error: dict[str, Any]) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.get("message")}}


def _completions_event(_: int, error: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n" + _DONE


def _responses_event(_: int, error: dict[str, Any]) -> bytes:
    content = {"code": str(error.get("code", "")), "message": error.get("message"), "param": error.get("param")}
    return _named_event({"type": "error", "sequence_number": 0, **content})


def _named_event(content: dict[str, Any]) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(content) + b"\n\n"


_OPENAI = _Dialect(None, _completions_event)
_DIALECTS: Mapping[str, _Dialect] = MappingProxyType(
    {
        "/v1/messages": _Dialect(_anthropic, lambda status, error: _named_event(_anthropic(status, error))),
        "/v1/responses": _Dialect(None, _responses_event),
    }
)
"""By path, for those below it as well. All others tell errors as OpenAI does: vLLM has that shape at the paths of
Cohere, Jina and SageMaker, too."""


def _dialect_of(path: str) -> _Dialect:
    found = (dialect for known, dialect in _DIALECTS.items() if path == known or path.startswith(f"{known}/"))
    return next(found, _OPENAI)


def changes_errors(path: str) -> bool:
    """Whether the API at this path has answers with errors in another shape than OpenAI's."""
    return _dialect_of(path).answer is not None


def error_answer(path: str, status: int, body: bytes) -> bytes:
    """Return the body of an error's answer as the API at this path has it. `body`: in OpenAI's shape, or already so."""
    answer = _dialect_of(path).answer
    return body if answer is None else msgspec.json.encode(answer(status, _error_in(status, body)))


def error_event(path: str, status: int, body: bytes) -> bytes:
    """Return the event for an error in a stream that has begun. `status`, `body`: of the answer that it would be
    otherwise."""
    return _dialect_of(path).event(status, _error_in(status, body))


def comment(text: str) -> bytes:
    """Return a comment in a stream of events, which clients skip."""
    return f": {' '.join(text.split())}\n\n".encode()


def _error_in(status: int, body: bytes) -> dict[str, Any]:
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        error = None
    if isinstance(error, dict):
        return error
    message = body.decode(errors="replace").strip() or "the server has given no answer"
    return {"message": message, "type": "InternalServerError", "param": None, "code": status}
