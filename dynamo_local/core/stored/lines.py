"""Lines of a batch: the requests of its input, each checked by itself, and the results of its outputs. Pure."""

from __future__ import annotations

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from dynamo_local.core.answers.requests import unfit_field
from dynamo_local.core.http.bounds.admission import Refusal, read_fields
from dynamo_local.core.http.json_text import as_line, as_utf8
from dynamo_local.core.stored.batches import BatchUsage, LineError

Judge = Callable[[dict[str, Any]], Refusal | None]
"""Returns why a model cannot be asked what a body has in its fields."""

NOT_UTF8 = "invalid_encoding"
"""Code of a line that is in another encoding, as the whole file is."""

_ID_CHARACTERS = 512
_SHOWN = 60


class Line(msgspec.Struct, frozen=True):
    """A request of a batch. `number`: of its line, from 1. `body`: JSON, as it was given."""

    number: int
    custom_id: str
    url: str
    body: bytes


class LineRefusedError(Exception):
    """The line is no request. `error` tells why."""

    def __init__(self, error: LineError) -> None:
        super().__init__(error.message)
        self.error = error


class _Given(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


_given = msgspec.json.Decoder(_Given)


def read_line(number: int, text: bytes) -> Line:
    """Read a line of an input. Raises LineRefusedError, which names line and field."""

    def refused(code: str, why: str, param: str | None = None) -> LineRefusedError:
        return LineRefusedError(LineError(code, f"line {number}: {why}", param, number))

    if b"\0" in text or text.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise refused(NOT_UTF8, "the file is in UTF-16 or UTF-32, or no text: save it as UTF-8")
    try:
        given = _given.decode(as_utf8(text))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise refused("invalid_json_line", f"it is no JSON object: {error}") from error
    if not isinstance(given.custom_id, str) or not 0 < len(given.custom_id) <= _ID_CHARACTERS:
        raise refused("invalid_request", f"custom_id must be text of 1 to {_ID_CHARACTERS} characters", "custom_id")
    if given.method != "POST":
        raise refused("invalid_method", f"method must be POST, got {str(given.method)[:_SHOWN]!r}", "method")
    if not isinstance(given.url, str):
        raise refused("invalid_url", "url must be text", "url")
    body = bytes(given.body)
    if not body.startswith(b"{"):
        raise refused("invalid_request", "body must be an object", "body")
    return Line(number, given.custom_id, given.url, body)


class _Asked(msgspec.Struct):
    model: Any = None


_asked = msgspec.json.Decoder(_Asked)


def model_of(line: Line) -> str:
    """Return the name of the model that a line asks for; empty if it names none."""
    try:
        name = _asked.decode(line.body).model
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


class LineChecks:
    """Checks the lines of one input, in their order. `judge`: for the models of the server."""

    def __init__(self, endpoint: str, judge: Judge) -> None:
        self._endpoint = endpoint
        self._judge = judge
        self._first: dict[str, int] = {}

    def check(self, number: int, text: bytes) -> Line:
        """Return the line if it is a request that can be run. Raises LineRefusedError."""
        line = read_line(number, text)

        def refused(code: str, why: str, param: str | None) -> LineRefusedError:
            return LineRefusedError(LineError(code, f"line {number}: {why}", param, number))

        if line.url != self._endpoint:
            raise refused("invalid_url", f"url must be {self._endpoint}, got {line.url[:_SHOWN]!r}", "url")
        if (first := self._first.setdefault(line.custom_id, number)) != number:
            raise refused("duplicate_custom_id", f"custom_id is that of line {first}", "custom_id")
        fields = read_fields(line.body)
        if isinstance(fields, Refusal):
            raise refused("invalid_request", fields.message, "body")
        if (name := unfit_field(fields, (line.url,))) is not None:
            raise refused("invalid_request", f"{name} cannot be set in a batch", f"body.{name}")
        if (refusal := self._judge(fields)) is not None:
            code = "model_not_found" if refusal.status == 404 else "invalid_request"
            raise refused(code, refusal.message, "body" if refusal.param is None else f"body.{refusal.param}")
        return line


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: Mapping[str, str] | None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Of all APIs: the newer ones name input and output what the others call prompt and completion."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)


class _Told(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Recorded(msgspec.Struct):
    id: str
    custom_id: str
    response: _Told | None = None


_recorded = msgspec.json.Decoder(_Recorded)


class Recorded(NamedTuple):
    """A result: whose it is, and the tokens that its answer tells of."""

    custom_id: str
    usage: BatchUsage


def answered_line(result_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Return the line of an output for a request that was answered, with its line feed."""
    try:
        # In one line, whatever the answer was formatted like.
        raw = msgspec.Raw(msgspec.json.format(body, indent=-1))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raw = msgspec.Raw(msgspec.json.encode(body.decode("utf-8", "replace")))
    return _encoded(_Result(result_id, custom_id, _Response(status, result_id, raw), None))


def unasked_line(result_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the line of an output for a request that was not answered, with its line feed."""
    return _encoded(_Result(result_id, custom_id, None, {"code": code, "message": message}))


def _encoded(result: _Result) -> bytes:
    return as_line(msgspec.json.encode(result))


def recorded_in(text: bytes) -> Recorded | None:
    """Return what a line of an output records; None: it is no whole line."""
    if not text.endswith(b"\n"):
        return None
    try:
        found = _recorded.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return Recorded(found.custom_id, BatchUsage() if found.response is None else usage_of(found.response.body))


def usage_of(body: bytes | msgspec.Raw) -> BatchUsage:
    """Return the tokens that an answer tells of; none if it tells of none."""
    try:
        told = _answer.decode(body).usage or _Usage()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return BatchUsage()
    given = told.input_tokens_details or told.prompt_tokens_details or _Details()
    made = told.output_tokens_details or told.completion_tokens_details or _Details()
    return BatchUsage(
        told.input_tokens or told.prompt_tokens or 0,
        given.cached_tokens or 0,
        told.output_tokens or told.completion_tokens or 0,
        made.reasoning_tokens or 0,
    )
