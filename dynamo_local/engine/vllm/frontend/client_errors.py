"""What is wrong with the body of a request, told in sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_MOST_TOLD, _MOST_READ = 10, 1000
_SHOWN = 60
_KINDS = ("Value error, ", "Assertion failed, ")
"""Begin what pydantic says of errors that a validator has raised."""
_NAMED = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})
"""Kinds of errors that are told by pydantic's name as well, which clients look for."""


def tell_invalid_bodies(app: Any) -> None:
    """Have the application tell in sentences what is wrong with a body: vLLM answers with Python's text of pydantic's
    records."""
    from fastapi.exceptions import RequestValidationError
    from starlette.responses import JSONResponse
    from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler

    async def answer(request: Any, error: Any) -> JSONResponse:
        answered = await validation_exception_handler(request, error)
        content = json.loads(answered.body)
        content["error"]["message"] = in_sentences(error.errors())
        return JSONResponse(content, answered.status_code)

    app.add_exception_handler(RequestValidationError, answer)


def in_sentences(errors: Sequence[Any]) -> str:
    """Return what is wrong with a body. `errors`: pydantic's, or texts."""
    from vllm.entrypoints.serve.exception_handling.utils import sanitize_message

    said = list(dict.fromkeys(map(_in_words, errors[:_MOST_READ])))
    more = "; and more" if len(said) > _MOST_TOLD or len(errors) > _MOST_READ else ""
    told: str = sanitize_message("; ".join(said[:_MOST_TOLD]) + more)
    return told or "the body is not valid"


def _in_words(error: Any) -> str:
    from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param

    if not isinstance(error, dict):
        return str(error)
    if error.get("type") == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']} (character {error['loc'][-1]})"
    why, place = str(error.get("msg")), clean_loc_for_param(tuple(error.get("loc", ()))).removeprefix("body.")
    for kind in _KINDS:
        why = why.removeprefix(kind)
    given = error.get("input")
    if given is None or isinstance(given, str | int | float):
        shown = json.dumps(given[:_SHOWN] if isinstance(given, str) else given)[: _SHOWN + 2]
        why = f"{why}, got {shown}"
    if error.get("type") in _NAMED:
        why = f"{why} ({error['type']})"
    return why if why.startswith(place) else f"{place}: {why}"
