"""REST about endpoints: each request is an order or a refusal, and each answer of the server has its status."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.orders.endpoints import MOST_BYTES, order_of, rendered
from dynamo_local.core.http.paths import route_of
from dynamo_local.core.messages.endpoints import (
    AdapterOrdered,
    CreateEndpoint,
    DeleteEndpoint,
    EndpointOrder,
    EndpointRefusal,
    EndpointsAnswer,
    EndpointStatus,
    EndpointView,
    ListEndpoints,
    ParkEndpoint,
    ScaleEndpoint,
    UpdateEndpoint,
    WakeEndpoint,
)

ALL = "/v1/endpoints"
ONE = "/v1/endpoints/chat"
SCALED = "/v1/endpoints/chat/scale"
PARKED = "/v1/endpoints/chat/park"
WOKEN = "/v1/endpoints/chat/wake"
VIEW = EndpointView(EndpointSpec(name="chat", model="m"), EndpointStatus("starting", "soon"), 1.0, 2.0, ("chat",))


@pytest.mark.parametrize(
    ("method", "path", "body", "order"),
    [
        ("GET", ALL, "", ListEndpoints()),
        ("POST", ALL, '{"name": "chat", "model": "m"}', CreateEndpoint({"name": "chat", "model": "m"})),
        ("GET", ONE, "", ListEndpoints("chat")),
        ("PUT", ONE, '{"max_workers": 3}', UpdateEndpoint("chat", {"max_workers": 3})),
        ("PATCH", ONE, '{"name": "chat", "model": null}', UpdateEndpoint("chat", {"model": None})),
        ("DELETE", ONE, "", DeleteEndpoint("chat")),
        ("POST", SCALED, '{"workers": 2}', ScaleEndpoint("chat", 2)),
        ("POST", SCALED, '{"prefill_workers": 0}', ScaleEndpoint("chat", None, 0)),
        ("POST", PARKED, "", ParkEndpoint("chat")),
        ("POST", WOKEN, "{}", WakeEndpoint("chat")),
    ],
)
def test_each_request_is_its_order(method: str, path: str, body: str, order: EndpointOrder) -> None:
    route = route_of(path)
    assert route is not None
    assert route.admin
    assert method in route.methods
    assert order_of(method, path, body.encode()) == order


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", ALL, "", 400),
        ("POST", ALL, "[1]", 400),
        ("POST", ALL, '{"a": NaN}', 400),
        ("POST", ALL, "[" * 100_000, 400),
        ("POST", ALL, '{"model": "' + "x" * MOST_BYTES + '"}', 413),
        ("GET", "/v1/endpoints/Chat", "", 400),
        ("DELETE", "/v1/endpoints/a%2Fb", "", 400),
        ("PATCH", ONE, '{"name": "other"}', 400),
        ("POST", SCALED, "{}", 400),
        ("POST", SCALED, '{"workers": -1}', 400),
        ("POST", SCALED, '{"workers": 1.5}', 400),
        ("POST", SCALED, '{"workers": true}', 400),
        ("POST", SCALED, '{"workers": 99999999999}', 400),
        ("POST", SCALED, '{"replicas": 1}', 400),
        ("POST", PARKED, '{"asked": true}', 400),
        ("POST", WOKEN, '{"asked": true}', 400),
        ("POST", WOKEN, "[]", 400),
    ],
)
def test_what_is_no_order_is_refused(method: str, path: str, body: str, status: int) -> None:
    refused = order_of(method, path, body.encode())
    assert isinstance(refused, Refusal)
    assert refused.status == status


@given(
    st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE"]),
    st.sampled_from([ALL, ONE, SCALED, PARKED, WOKEN]),
    st.binary(),
)
def test_nothing_but_orders_and_refusals_comes_of_any_body(method: str, path: str, body: bytes) -> None:
    assert isinstance(order_of(method, path, body), EndpointOrder | Refusal)


@pytest.mark.parametrize(
    "path",
    ["/v1/endpointsx", "/v1/endpoints//", "/v1/endpoints//scale", "/v1/endpoints/a/b", "/v1/endpoints/a/scale/b"],
)
def test_no_other_path_is_open(path: str) -> None:
    assert route_of(path) is None


@pytest.mark.parametrize(
    ("order", "status"),
    [
        (CreateEndpoint({}), 201),
        (ListEndpoints("chat"), 200),
        (UpdateEndpoint("chat", {}), 202),
        (DeleteEndpoint("chat"), 202),
        (ScaleEndpoint("chat", 1), 202),
        (ParkEndpoint("chat"), 202),
        (WakeEndpoint("chat"), 202),
    ],
)
def test_an_endpoint_is_shown_with_all_its_fields(order: EndpointOrder, status: int) -> None:
    answer: Any = rendered(order, EndpointsAnswer((VIEW,)))
    assert answer[0] == status
    content = json.loads(json.dumps(answer[1]))
    assert (content["object"], content["name"], content["min_workers"]) == ("endpoint", "chat", 1)
    assert (content["status"]["state"], content["status"]["ready"]) == ("starting", 0)


def test_the_order_of_an_adapter_says_what_it_has_come_to() -> None:
    rolled = msgspec.structs.replace(VIEW, adapter=AdapterOrdered("rolled", "chat is rolled"))
    created: Any = rendered(CreateEndpoint({}), EndpointsAnswer((rolled,)))
    assert created[1]["adapter"] == {"result": "rolled", "reason": "chat is rolled"}
    listed: Any = rendered(ListEndpoints("chat"), EndpointsAnswer((VIEW,)))
    assert "adapter" not in listed[1]


def test_a_list_may_be_empty_and_a_name_unknown() -> None:
    assert rendered(ListEndpoints(), EndpointsAnswer()) == (200, {"object": "list", "data": []})
    unknown = rendered(ListEndpoints("chat"), EndpointsAnswer())
    assert isinstance(unknown, Refusal)
    assert unknown.status == 404
    gone: Any = rendered(DeleteEndpoint("chat"), EndpointsAnswer())
    assert gone == (200, {"object": "endpoint", "name": "chat", "deleted": True})


@pytest.mark.parametrize("status", [400, 404, 409, 503, 500])
def test_a_refusal_of_the_server_has_openais_shape(status: int) -> None:
    refused = rendered(CreateEndpoint({}), EndpointsAnswer(refused=EndpointRefusal(status, "it is there", "update it")))
    assert isinstance(refused, Refusal)
    assert refused.status == (status if status != 500 else 400)
    assert json.loads(refused.body())["error"]["message"] == "it is there; update it"
    assert (refused.retry_after_s is not None) is (status == 503)
