"""REST under /v1/keys as orders, and the answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.orders.keys import key_order_of, rendered_keys
from dynamo_local.core.http.paths import route_of
from dynamo_local.core.messages.endpoints import EndpointRefusal
from dynamo_local.core.messages.keys import (
    CreateKey,
    KeyOrder,
    KeysAnswer,
    KeyView,
    ListKeys,
    RevokeKey,
    RotateKey,
)

VIEW = KeyView(name="a", created_at=1.0)


@pytest.mark.parametrize(
    ("method", "path", "body", "order"),
    [
        ("GET", "/v1/keys", "", ListKeys(None, "boss")),
        ("GET", "/v1/keys/a", "", ListKeys("a", "boss")),
        ("POST", "/v1/keys", '{"name": "a"}', CreateKey({"name": "a"}, "boss")),
        ("DELETE", "/v1/keys/a", "", RevokeKey("a", by="boss")),
        ("DELETE", "/v1/keys/a", '{"open": true}', RevokeKey("a", opens=True, by="boss")),
        ("POST", "/v1/keys/a/rotate", "", RotateKey("a", None, "boss")),
        ("POST", "/v1/keys/a/rotate", '{"overlap_s": 5}', RotateKey("a", 5, "boss")),
    ],
)
def test_requests_are_orders(method: str, path: str, body: str, order: KeyOrder) -> None:
    route = route_of(path)
    assert route is not None
    assert route.admin
    assert method in route.methods
    assert key_order_of(method, path, body.encode(), "boss") == order


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        ("POST", "/v1/keys", "", "no JSON|not a JSON"),
        ("POST", "/v1/keys", "[]", "not a JSON object"),
        ("GET", "/v1/keys/A%20b", "", "no name for a key"),
        ("DELETE", "/v1/keys/a", '{"opens": true}', "there is no field"),
        ("DELETE", "/v1/keys/a", '{"open": 1}', "true or false"),
        ("POST", "/v1/keys/a/rotate", '{"overlap": 1}', "there is overlap_s"),
    ],
)
def test_what_is_no_order_is_refused(method: str, path: str, body: str, message: str) -> None:
    refused = key_order_of(method, path, body.encode(), "")
    assert isinstance(refused, Refusal)
    assert refused.status == 400
    assert any(part in refused.message for part in message.split("|"))


@pytest.mark.parametrize("path", ["/v1/keys/", "/v1/keys/a/b", "/v1/keys/a/rotate/b", "/v1/keysa", "/v1/keys//rotate"])
def test_other_paths_are_closed(path: str) -> None:
    assert route_of(path) is None


@given(st.sampled_from(["GET", "POST", "DELETE"]), st.text(max_size=20), st.binary(max_size=40))
def test_anything_is_an_order_or_a_refusal(method: str, name: str, body: bytes) -> None:
    assert isinstance(key_order_of(method, f"/v1/keys/{name}", body, ""), KeyOrder | Refusal)


def test_the_secret_is_in_the_answer_that_makes_it() -> None:
    created = rendered_keys(CreateKey({}), KeysAnswer((VIEW,), "s"))
    assert isinstance(created, tuple)
    assert (created[0], created[1]["secret"], created[1]["name"]) == (201, "s", "a")
    listed = rendered_keys(ListKeys(), KeysAnswer((VIEW,)))
    assert isinstance(listed, tuple)
    assert "secret" not in listed[1]["data"][0]
    assert rendered_keys(RevokeKey("a"), KeysAnswer()) == (200, {"object": "key", "name": "a", "deleted": True})
    refused = rendered_keys(
        ListKeys("b"), KeysAnswer(refused=EndpointRefusal(404, "there is no key b", "there are: a"))
    )
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.message) == (404, "there is no key b; there are: a")
