"""Errors, in answers and in streams: each API has a shape of its own."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.dialects import changes_errors, comment, error_answer, error_event
from dynamo_local.core.http.paths import ROUTES

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""As Anthropic's documentation has them; 503 is its 529."""
SERVER = {"overloaded_error", "timeout_error"}

REFUSAL = Refusal(503, "no worker", "ServiceUnavailableError").body()


@given(st.text())
def test_a_comment_is_one_line_that_clients_skip(text: str) -> None:
    said = comment(text).decode(errors="surrogatepass")
    assert said.startswith(": ")
    assert said.endswith("\n\n")
    assert "\n" not in said[:-2]
    assert "\r" not in said


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_error_of_completions_is_followed_by_the_end(path: str) -> None:
    event, end, rest = error_event(path, 503, REFUSAL).split(b"\n\n")
    assert json.loads(event.removeprefix(b"data: ")) == json.loads(REFUSAL)
    assert (end, rest) == (b"data: [DONE]", b"")


def test_an_error_of_messages_has_the_shape_of_anthropic() -> None:
    vllms = b'{"type": "error", "error": {"type": "ServiceUnavailableError", "message": "no worker"}}'
    shape = {"type": "error", "error": {"type": "overloaded_error", "message": "no worker"}}
    for body in (REFUSAL, vllms):
        name, data = error_event("/v1/messages", 503, body).strip().split(b"\n")
        assert name == b"event: error"
        assert json.loads(data.removeprefix(b"data: ")) == shape
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
            assert json.loads(error_answer(path, 503, body)) == shape


def test_every_other_path_has_the_shape_of_openai() -> None:
    for path in ROUTES.keys() - {"/v1/messages", "/v1/messages/count_tokens"}:
        assert not changes_errors(path)
        assert error_answer(path, 503, REFUSAL) == REFUSAL


@given(st.integers(400, 599))
def test_every_status_has_one_of_anthropics_types(status: int) -> None:
    kind = json.loads(error_answer("/v1/messages", status, REFUSAL))["error"]["type"]
    assert (kind == "api_error" or kind in SERVER) == (status >= 500)


def test_types_of_anthropic_are_those_of_its_clients() -> None:
    for status, kind in TYPES.items():
        assert json.loads(error_answer("/v1/messages", status, REFUSAL))["error"]["type"] == kind


def test_an_error_of_responses_is_an_event_of_that_type() -> None:
    name, data = error_event("/v1/responses", 503, REFUSAL).strip().split(b"\n")
    assert name == b"event: error"
    content = json.loads(data.removeprefix(b"data: "))
    assert (content["type"], content["message"], content["code"]) == ("error", "no worker", "503")


@given(st.binary(max_size=200))
def test_whatever_the_server_said_becomes_an_error(body: bytes) -> None:
    event = error_event("/v1/completions", 500, body).partition(b"\n")[0]
    assert isinstance(json.loads(event.removeprefix(b"data: "))["error"], dict)
