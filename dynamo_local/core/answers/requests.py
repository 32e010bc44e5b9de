"""Requests whose answers are kept, as vLLM's application gets them, and as clients see them before it has. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from dynamo_local.core.answers.events import COMPLETED, INCOMPLETE, QUEUED
from dynamo_local.core.answers.records import AnswerHead
from dynamo_local.core.http.bounds.admission import Refusal, read_fields
from dynamo_local.core.http.json_text import as_utf8, boolean
from dynamo_local.core.http.paths import RESPONSES

PREVIOUS = "previous_response_id"

_OURS = frozenset({"background", "store", "stream", "request_id", PREVIOUS})
"""Fields that vLLM's application gets with other values, or not at all."""

_ASKING = (b"background", b"store", PREVIOUS.encode())
"""Most bodies have none of these, and are not read twice."""

_ID = re.compile(r"resp_[0-9a-f]{32}")


def is_answer_id(text: str) -> bool:
    """Whether the text could be the id of an answer that is kept."""
    return _ID.fullmatch(text) is not None


def is_kept(fields: Mapping[str, Any]) -> bool:
    """Whether the answer to a request is to be kept: it is to be computed in the background, the request says so, or
    goes on from an answer that was kept and does not say otherwise."""
    goes_on = fields.get(PREVIOUS) is not None and fields.get("store") is None
    return goes_on or bool(boolean(fields.get("background")) or boolean(fields.get("store")))


def asking_fields(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a request's body, if its answer is to be kept, or goes on from one that was."""
    try:
        body = as_utf8(body)
    except UnicodeDecodeError:
        return None
    if not any(name in body for name in _ASKING):
        return None
    fields = read_fields(body)
    if isinstance(fields, Refusal):
        return None
    return fields if is_kept(fields) or fields.get(PREVIOUS) is not None else None


def unfit_field(fields: Mapping[str, Any], paths: Collection[str]) -> str | None:
    """Return the field by which a request for one of these paths asks for what has no use where its answer is recorded
    as a result: a stream, or an answer that is kept besides. None: there is none."""
    names = ("stream", "background", "store") if RESPONSES in paths else ("stream", "background")
    return next((name for name in names if boolean(fields.get(name))), None)


def contradiction(fields: Mapping[str, Any]) -> Refusal | None:
    """Refuse what cannot be computed in the background because it is not to be kept."""
    if boolean(fields.get("background")) and boolean(fields.get("store")) is False:
        return _bad("background can only be used when `store` is true: leave `store` out, or set it to true", "store")
    return None


def continued(previous: AnswerHead, response: Mapping[str, Any]) -> list[Any] | Refusal:
    """Return the conversation up to the end of an answer, from which a request is to go on."""
    if response.get("status") not in (COMPLETED, INCOMPLETE):
        why = f"response {previous.answer} is {response.get('status')}: only one that is completed can be continued"
        return _bad(why, PREVIOUS)
    return [*previous.earlier, *_own_input(previous.fields), *response.get("output", ())]


def not_found(answer: str) -> Refusal:
    """Return the refusal for an answer that is not there, or not the caller's."""
    return Refusal(404, f"Response with id '{answer[:100]}' not found.", "invalid_request_error", "response_id")


def inner_body(head: AnswerHead) -> bytes:
    """Return the body with which vLLM's application is asked: always for a stream, and without anything to keep."""
    fields = {name: value for name, value in head.fields.items() if name not in _OURS}
    if head.earlier:
        fields["input"] = [*head.earlier, *_own_input(head.fields)]
    return msgspec.json.encode({**fields, "stream": True, "store": False, "request_id": head.answer})


def continued_body(fields: Mapping[str, Any], earlier: list[Any]) -> bytes:
    """Return the body with which vLLM's application is asked for an answer that goes on from an earlier one, and is not
    kept. `earlier`: the conversation before."""
    given = {name: value for name, value in fields.items() if name != PREVIOUS}
    return msgspec.json.encode({**given, "input": [*earlier, *_own_input(fields)]})


def input_items(head: AnswerHead) -> list[dict[str, Any]]:
    """Return the items that an answer was computed from, the conversation before it first, each with an id, as OpenAI's
    clients know them."""
    given = [item for item in (*head.earlier, *_own_input(head.fields)) if isinstance(item, dict)]
    return [
        _identified(item, f"item_{head.answer.removeprefix('resp_')}_{number}") for number, item in enumerate(given)
    ]


def _identified(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    whole = {"id": name, "type": "message", **item}
    if whole["type"] == "message":
        whole.setdefault("status", "completed")
        if isinstance(whole.get("content"), str):
            kind = "output_text" if whole.get("role") == "assistant" else "input_text"
            text = {"type": kind, "text": whole["content"]}
            whole["content"] = [{**text, "annotations": []} if kind == "output_text" else text]
    return whole


def first_events(head: AnswerHead) -> list[dict[str, Any]]:
    """Return the events of an answer that nobody computes yet."""
    fields = head.fields
    response = {
        "id": head.answer,
        "object": "response",
        "created_at": head.created_at,
        "status": QUEUED,
        "background": head.background,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": fields.get("metadata"),
        "model": fields.get("model") or "",
        "output": [],
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        PREVIOUS: fields.get(PREVIOUS),
        "store": True,
        "temperature": fields.get("temperature"),
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "top_p": fields.get("top_p"),
        "usage": None,
    }
    return [
        {"type": "response.created", "sequence_number": 0, "response": response},
        {"type": "response.queued", "sequence_number": 1, "response": response},
    ]


def as_kept(event: dict[str, Any], head: AnswerHead) -> dict[str, Any]:
    """Return an event of vLLM's with what it does not know of the answer."""
    response = event.get("response")
    if not isinstance(response, dict):
        return event
    known = {
        "id": head.answer,
        "created_at": head.created_at,
        "background": head.background,
        PREVIOUS: head.fields.get(PREVIOUS),
        "store": True,
    }
    return {**event, "response": {**response, **known}}


def _own_input(fields: Mapping[str, Any]) -> list[Any]:
    """Return the items of a request's own input; none of what is no input."""
    given = fields.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return list(given) if isinstance(given, list) else []


def _bad(why: str, param: str) -> Refusal:
    return Refusal(400, why, "invalid_request_error", param)
