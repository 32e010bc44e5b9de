"""Errors of clients: told in sentences, and left out of vLLM's log.

The client has been told, and the server has no problem: vLLM logs a traceback of several kilobytes for a request that
it refuses while it streams.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError

_MOST_TOLD, _MOST_READ = 10, 1000
_SHOWN = 60
_KINDS = ("Value error, ", "Assertion failed, ")
"""Begin what pydantic says of errors that a validator has raised."""


def drop_clients_errors() -> None:
    """Filter vLLM's log in this process. A second call changes nothing."""
    for handler in logging.getLogger("vllm").handlers:
        if not any(isinstance(known, ClientErrors) for known in handler.filters):
            handler.addFilter(ClientErrors())


class ClientErrors(logging.Filter):
    """Passes everything but tracebacks of errors that are a client's, or that were answered on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, VLLMClientError | GracefulHTTPError)


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
    return why if why.startswith(place) else f"{place}: {why}"
