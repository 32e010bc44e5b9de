"""The gate: what comes in, how it is refused, and that nothing else reaches the server behind."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from dynamo_local.core.admission import Limits
from dynamo_local.runtime.http_gate import GENERATION_PATHS, KEYLESS_PATHS, OPEN_PATHS, Event, Scope
from tests.unit.runtime.asgi_driver import House, call, scope

ANSWERED_BY_THE_GATE = {"/health", "/live"}
KEYED_PATHS = OPEN_PATHS - KEYLESS_PATHS


def bearer(key: str) -> list[tuple[str, str]]:
    return [("Authorization", f"Bearer {key}")]


@pytest.mark.parametrize("path", sorted(OPEN_PATHS - ANSWERED_BY_THE_GATE))
async def test_open_paths_reach_the_server(path: str) -> None:
    house = House()
    assert (await house.post(path, {"a": 1})).body == b"served"
    assert house.backend.requests == [("POST", path, b'{"a": 1}')]


@pytest.mark.parametrize(
    "path",
    [
        "/", "", "/docs", "/openapi.json", "/v1", "/v1/", "/v1/chat/completions/", "//v1/chat/completions",
        "/v1//chat/completions", "/v1/../v1/models", "/v1/./models", "/v1/models/..", "/V1/models", "/v1/Models",
        "/v1/models?x", "/v1/models#x", "/v1/models;x", "/v1/models ", "/v1/models\x00", "/v1%2fmodels",
        "/health/", "/metrics/x", "/sleep", "/wake_up", "/reset_prefix_cache", "/collective_rpc", "/pause",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/embeddings", "/v1/audio/transcriptions",
        "/v1/chat/completions/batch", "/scale_elastic_ep", "/server_info", "/invocations", "http://x/v1/models",
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
    answer = await call(house.gate, scope("/v1/models/sleep", "GET", root_path="/v1/models"))
    assert answer.status == 404
    assert house.backend.requests == []


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "post"])
@pytest.mark.parametrize("path", sorted(GENERATION_PATHS))
async def test_other_methods_are_the_servers_to_refuse(path: str, method: str) -> None:
    house = House()
    await house.get(path, method)
    assert house.backend.requests == [(method, path, b"")]


async def test_a_client_library_is_served() -> None:
    house = House()
    transport = httpx.ASGITransport(app=house.gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post("/v1/completions", json={"prompt": "a"})).text == "served"
        assert (await client.post("/v1/completions", json={"n": 99})).status_code == 400
        assert (await client.get("/v1/models/%2e%2e/sleep")).status_code == 404


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


@pytest.mark.parametrize("path", sorted(KEYED_PATHS))
@pytest.mark.parametrize(
    "headers",
    [
        [], bearer("wrong"), bearer(""), bearer("secret "), bearer("secre"), bearer("secret\0"),
        [("Authorization", "secret")], [("Authorization", "Basic secret")], [("Authorization", "Bearer")],
        [("X-Api-Key", "wrong")], [("X-Api-Key", "")], [("Authorization", "Bearer wrong"), *bearer("secret")],
    ],
)  # fmt: skip
async def test_without_a_right_key_nothing_is_served(path: str, headers: list[tuple[str, str]]) -> None:
    house = House(keys=["secret", "other"])
    answer = await house.post(path, headers=headers)
    assert (answer.status, answer.error["type"]) == (401, "AuthenticationError")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert house.backend.requests == []


@pytest.mark.parametrize("key", ["secret", "other", "schlüssel"])
async def test_each_right_key_opens_in_either_header(key: str) -> None:
    house = House(keys=["secret", "other", "schlüssel"])
    for headers in (bearer(key), [("authorization", f"bearer {key}")], [("X-Api-Key", key)]):
        assert (await house.post("/v1/completions", headers=headers)).status == 200


@pytest.mark.parametrize("path", sorted(KEYLESS_PATHS))
async def test_monitoring_needs_no_key(path: str) -> None:
    assert (await House(keys=["secret"]).get(path)).status == 200


async def test_a_browser_asks_beforehand_without_a_key() -> None:
    """A preflight request never carries one; it changes nothing."""
    assert (await House(keys=["secret"]).get("/v1/completions", "OPTIONS")).status == 200


async def test_a_key_is_asked_for_before_the_body_is_read() -> None:
    house = House(keys=["secret"])
    assert (await house.post("/v1/completions", b"x" * 2000)).status == 401


# Limits


async def test_requests_beyond_the_limits_are_refused() -> None:
    house = House(limits=Limits(max_n=2))
    answer = await house.post("/v1/chat/completions", {"n": 3})
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert house.backend.requests == []


async def test_what_is_not_json_is_refused() -> None:
    house = House()
    assert (await house.post("/v1/completions", b'{"n": NaN}')).error["type"] == "BadRequestError"
    assert house.backend.requests == []


async def test_nobody_is_served_without_a_worker() -> None:
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
    assert (answer.status, answer.error["type"]) == (429, "RateLimitError")
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
