"""Events that are written instead of the OpenAI server's: each API has errors of its own."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.event_streams import comment, error_event

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
    event, end, rest = error_event(path, REFUSAL).split(b"\n\n")
    assert json.loads(event.removeprefix(b"data: ")) == json.loads(REFUSAL)
    assert (end, rest) == (b"data: [DONE]", b"")


def test_an_error_of_messages_has_the_shape_of_anthropic() -> None:
    own = b'{"type": "error", "error": {"type": "ServiceUnavailableError", "message": "no worker"}}'
    for body in (REFUSAL, own):
        name, data = error_event("/v1/messages", body).strip().split(b"\n")
        assert name == b"event: error"
        assert json.loads(data.removeprefix(b"data: ")) == json.loads(own)


def test_an_error_of_responses_is_an_event_of_that_type() -> None:
    name, data = error_event("/v1/responses", REFUSAL).strip().split(b"\n")
    assert name == b"event: error"
    content = json.loads(data.removeprefix(b"data: "))
    assert (content["type"], content["message"], content["code"]) == ("error", "no worker", "503")


@given(st.binary(max_size=200))
def test_whatever_the_server_said_becomes_an_error(body: bytes) -> None:
    event = error_event("/v1/completions", body).partition(b"\n")[0]
    assert isinstance(json.loads(event.removeprefix(b"data: "))["error"], dict)
