"""The gate: what comes in, how it is refused, and that nothing else reaches the server behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from dynamo_local.core.http.asgi import CROWDED, Event, Scope
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.http.paths import ROUTES
from tests.unit.frontend.asgi_driver import House, call, scope

ANSWERED_BY_THE_GATE = {"/health", "/live", "/load"}
OPEN = sorted(
    [(path, method) for path, route in ROUTES.items() for method in route.methods]
    + [("/v1/models/org/some-model", "GET"), ("/v1/models/..", "GET")]
)
KEYLESS_PATHS = sorted(path for path, route in ROUTES.items() if route.keyless)
KEYED = [(path, method) for path, method in OPEN if path not in KEYLESS_PATHS]
GENERATION_PATHS = sorted(path for path, route in ROUTES.items() if route.generates)


def bearer(key: str) -> list[tuple[str, str]]:
    return [("Authorization", f"Bearer {key}")]


@pytest.mark.parametrize(("path", "method"), OPEN)
@pytest.mark.parametrize("slash", ["", "/"])
async def test_open_paths_reach_the_server(path: str, method: str, slash: str) -> None:
    house = House()
    body = b'{"a": 1}' if method == "POST" else b""
    answer = await call(house.gate, scope(path + slash, method), [body])
    if path in ANSWERED_BY_THE_GATE:
        assert (answer.status, house.backend.requests) == (200, [])
    else:
        assert (answer.body, house.backend.requests) == (b"served", [(method, path, body)])


@pytest.mark.parametrize(
    "path",
    [
        "/", "", "//", "/redoc", "/static", "/static/", "/static/../docs", "/docs/oauth2-redirect", "/v1", "/v1/",
        "/v1/chat/completions//", "//v1/chat/completions", "/v1/models//",
        "/v1//chat/completions", "/v1/../v1/models", "/v1/./models", "/V1/models", "/v1/Models",
        "/v1/models?x", "/v1/models#x", "/v1/models;x", "/v1/models ", "/v1/models\x00", "/v1%2fmodels",
        "/health//", "/metrics/x", "/sleep", "/wake_up", "/reset_prefix_cache", "/collective_rpc", "/pause",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/embeddings", "/v1/audio/transcriptions",
        "/v1/chat/completions/batch/x", "/scale_elastic_ep", "/server_info", "http://x/v1/models", "/v1/systemone",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
async def test_every_other_path_stays_closed(path: str, method: str) -> None:
    house = House()
    answer = await house.get(path, method)
    assert (answer.status, answer.error["type"]) == (404, "NotFoundError")
    assert house.backend.requests == []


async def test_a_mount_point_does_not_open_paths() -> None:
    """`root_path` is for the server behind to cut off; the gate judges the whole path."""
    house = House()
    answer = await call(house.gate, scope("/v1/sleep", "GET", root_path="/v1"))
    assert answer.status == 404
    assert house.backend.requests == []


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH", "post"])
@pytest.mark.parametrize("path", [*sorted(ROUTES), "/v1/models/some"])
async def test_other_methods_are_refused_with_those_that_are_open(path: str, method: str) -> None:
    house = House(keys=["secret"])
    if (path, method) in OPEN or (path == "/v1/models/some" and method == "GET"):
        return
    answer = await house.get(path, method)
    assert (answer.status, f"not {method}" in answer.error["message"]) == (405, True)
    assert all((path, allowed) in OPEN for allowed in answer.headers["allow"].split(", ") if path in ROUTES)
    assert house.backend.requests == []


async def test_a_client_library_is_served() -> None:
    house = House()
    transport = httpx.ASGITransport(app=house.gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post("/v1/completions", json={"prompt": "a"})).text == "served"
        assert (await client.post("/v1/completions", json={"n": 99})).status_code == 400
        assert (await client.get("/v1/%2e%2e/sleep")).status_code == 404
        assert (await client.get("/v1/models/org%2Fmodel")).status_code == 200
    assert house.backend.requests[-1][:2] == ("GET", "/v1/models/org/model")


async def test_a_websocket_is_closed() -> None:
    sent: list[Event] = []

    async def receive() -> Event:
        return {"type": "websocket.connect"}

    async def send(event: Event) -> None:
        sent.append(event)

    await House().gate({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert [event["type"] for event in sent] == ["websocket.close"]


async def test_the_lifespan_of_the_server_passes() -> None:
    seen: list[str] = []

    async def app(asked: Scope, _receive: Any, _send: Any) -> None:
        seen.append(asked["type"])

    house = House()
    house.gate._app = app
    await house.gate({"type": "lifespan"}, _never, _never)
    assert seen == ["lifespan"]


async def _never(*_: Any) -> Any:
    raise AssertionError("not called")


# Keys


@pytest.mark.parametrize(("path", "method"), KEYED)
@pytest.mark.parametrize(
    "headers",
    [
        [], bearer("wrong"), bearer(""), bearer("secret "), bearer("secre"), bearer("secret\0"),
        [("Authorization", "secret")], [("Authorization", "Basic secret")], [("Authorization", "Bearer")],
        [("X-Api-Key", "wrong")], [("X-Api-Key", "")], [("Authorization", "Bearer wrong"), *bearer("secret")],
    ],
)  # fmt: skip
async def test_without_a_right_key_nothing_is_served(path: str, method: str, headers: list[tuple[str, str]]) -> None:
    house = House(keys=["secret", "other"])
    answer = await house.get(path, method, headers)
    assert (answer.status, answer.error["message"]) == (401, "missing or wrong API key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert house.backend.requests == []


@pytest.mark.parametrize("key", ["secret", "other", "schlüssel"])
async def test_each_right_key_opens_in_either_header(key: str) -> None:
    house = House(keys=["secret", "other", "schlüssel"])
    for headers in (bearer(key), [("authorization", f"bearer {key}")], [("X-Api-Key", key)]):
        assert (await house.post("/v1/completions", headers=headers)).status == 200


@pytest.mark.parametrize("path", KEYLESS_PATHS)
async def test_monitoring_needs_no_key(path: str) -> None:
    assert (await House(keys=["secret"]).get(path)).status == 200


async def test_a_key_is_asked_for_before_the_body_is_read() -> None:
    house = House(keys=["secret"])
    assert (await house.post("/v1/completions", b"x" * 2000)).status == 401


# Limits


async def test_requests_beyond_the_limits_are_refused() -> None:
    house = House(limits=AdmissionLimits(max_n=2))
    answer = await house.post("/v1/chat/completions", {"n": 3})
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert house.backend.requests == []


async def test_a_header_that_names_a_model_does_not_pass() -> None:
    house = House()
    named = [("X-Amzn-SageMaker-Adapter-Identifier", "pirate")]
    answer = await call(house.gate, scope("/invocations", "POST", named), [b'{"model": "chat"}'])
    assert (answer.status, answer.error["param"], house.backend.requests) == (400, "model", [])


async def test_what_is_not_json_is_refused() -> None:
    house = House()
    assert (await house.post("/v1/completions", b'{"n": NaN}')).error["type"] == "BadRequestError"
    assert house.backend.requests == []


@pytest.mark.parametrize(
    "headers",
    [[("a", "b")] * 129, [("a", "b" * 33_000)], [("a" * 33_000, "b")], [("a" * 3000, "b" * 3000)] * 6],
    ids=["number", "value", "name", "sum"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/nowhere"])
async def test_a_head_is_bounded(path: str, headers: list[tuple[str, str]]) -> None:
    house = House()
    answer = await house.get(path, "POST", headers)
    assert (answer.status, "(setting max-header" in answer.error["message"]) == (431, True)
    assert (await house.get("/v1/models", headers=[("a", "b")] * 128)).status == 200


async def test_a_path_and_its_query_are_bounded() -> None:
    house = House()
    assert (await house.get("/v1/models/" + "x" * 33_000)).status == 431
    assert (await call(house.gate, scope("/v1/models", "GET", query_string=b"x" * 33_000))).status == 431


@pytest.mark.parametrize(("path", "method"), OPEN)
async def test_beyond_the_connections_there_is_room_for_monitoring(path: str, method: str) -> None:
    house = House(keys=["secret"])
    answer = await call(house.gate, scope(path, method, state={CROWDED: True}))
    assert answer.status == (200 if path in KEYLESS_PATHS else 503)
    assert answer.status == 200 or "(setting max-connections)" in answer.error["message"]


async def test_load_is_what_is_under_way() -> None:
    house = House()
    assert json.loads((await house.get("/load")).body) == {"server_load": 0}
    house.backend.open.clear()
    under_way = asyncio.create_task(house.post("/v1/completions", {"n": 3}))
    await house.backend.entered.acquire()
    assert json.loads((await house.get("/load")).body) == {"server_load": 1}
    house.backend.open.set()
    await under_way
    assert json.loads((await house.get("/load")).body) == {"server_load": 0}


async def test_nobody_is_served_without_a_worker_nor_waits_if_holding_is_off() -> None:
    house = House(worker=False)
    answer = await house.post("/v1/completions")
    assert (answer.status, answer.error["message"]) == (503, "no worker is ready")
    assert int(answer.headers["retry-after"]) > 0
    assert (await house.post("/tokenize")).status == 200


async def test_a_server_that_drains_takes_nothing_new() -> None:
    house = House(draining=True)
    answer = await house.post("/v1/completions")
    assert (answer.status, answer.error["message"]) == (503, "the server is shutting down")
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(("house", "health"), [(House(), 200), (House(worker=False), 503), (House(draining=True), 503)])
async def test_health_tells_whether_requests_are_served_and_life_whether_the_process_is(
    house: House, health: int
) -> None:
    for method in ("GET", "HEAD"):
        assert (await house.get("/health", method)).status == health
        assert (await house.get("/live", method)).status == 200
    assert house.backend.requests == []


async def test_a_full_house_says_so_and_has_room_again_afterwards() -> None:
    house = House()
    house.backend.open.clear()
    under_way = asyncio.create_task(house.post("/v1/completions", {"prompt": ["a", "b"], "n": 2}))
    await house.backend.entered.acquire()
    answer = await house.post("/v1/completions")
    assert (answer.status, answer.error["type"]) == (429, "requests")
    assert int(answer.headers["retry-after"]) > 0
    house.backend.open.set()
    assert (await under_way).status == 200
    assert await house.free_sequences() == 4


async def test_room_is_free_again_after_failures_and_cancellations() -> None:
    house = House()
    house.backend.fails = True
    with pytest.raises(RuntimeError):
        await house.post("/v1/completions", {"n": 3})
    house.backend.open.clear()
    cancelled = asyncio.create_task(house.post("/v1/completions", {"n": 3}))
    for _ in range(2):
        await house.backend.entered.acquire()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await house.free_sequences() == 4


async def test_refused_requests_take_no_room() -> None:
    house = House()
    refused: list[Any] = [{"n": 100}, {"kv_transfer_params": {}}, b"nothing"]
    for body in refused:
        assert (await house.post("/v1/completions", body)).status == 400
    assert await house.free_sequences() == 4


# What is changed in answers


async def test_event_streams_are_neither_kept_nor_collected_on_their_way() -> None:
    house = House()
    house.backend.answers = (200, "text/event-stream; charset=utf-8", b"data: {}\n\n")
    answer = await house.post("/v1/completions")
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert answer.body == b"data: {}\n\n"
    house.backend.answers = (200, "application/json", b"{}")
    assert "cache-control" not in (await house.post("/v1/completions")).headers


async def test_an_error_names_settings_as_they_are_named_here() -> None:
    house = House()
    text = b'"auto" requires --enable-auto-tool-choice and --tool-call-parser, not --other'
    house.backend.answers = (400, "application/json", text)
    answer = await house.post("/v1/completions")
    assert answer.body == (b'"auto" requires --Front.enable-auto-tool-choice and --Front.tool-call-parser, not --other')
    assert answer.headers["content-length"] == str(len(answer.body))
    house.backend.answers = (200, "application/json", text)
    assert (await house.post("/v1/completions")).body == text
