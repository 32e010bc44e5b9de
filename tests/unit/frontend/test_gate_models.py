"""The gate before several models, and the paths of administrators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from components.frontend.http.gate import Administration, HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from dynamo_local.core.http.asgi import Scope
from dynamo_local.core.http.bounds.admission import AdmissionLimits, Refusal
from dynamo_local.core.http.paths import ROUTES
from tests.unit.frontend.asgi_driver import Answer, Backend, call, scope

ASKING = sorted(path for path, route in ROUTES.items() if route.asks_model)
GENERATING = sorted(path for path, route in ROUTES.items() if route.generates)


class Street:
    """A gate with two models, and an application of its own for what concerns neither."""

    def __init__(self, **gate: Any) -> None:
        self.common = Backend()
        self.backends = {name: Backend() for name in "ab"}
        self.why: dict[str, str | None] = {"a": None, "b": None}
        self.limits = {
            "a": AdmissionLimits(max_requests=4, max_n=2, hold_timeout_s=0),
            "b": AdmissionLimits(max_requests=2, max_n=4, hold_timeout_s=0),
        }
        self.entries = {
            name: ModelEntry((name, f"{name}-too"), partial(self._why, name), self.limits[name], backend)
            for name, backend in self.backends.items()
        }
        self.table = ModelTable(self.entries.values())
        limits = AdmissionLimits(max_body_bytes=10_000)
        self.gate = HttpGate(self.common, limits=limits, models=self.table, is_draining=lambda: False, **gate)

    def _why(self, name: str) -> str | None:
        return self.why[name]

    async def ask(self, path: str, method: str = "POST", key: str = "", **fields: Any) -> Answer:
        headers = [("Authorization", f"Bearer {key}")] if key else []
        return await call(self.gate, scope(path, method, headers), [json.dumps(fields).encode()])


@pytest.mark.parametrize("path", ASKING)
async def test_every_path_that_asks_a_model_reaches_the_one_that_is_named(path: str) -> None:
    street = Street()
    for name in ("a", "b", "b-too"):
        assert (await street.ask(path, model=name)).body == b"served"
    assert [len(street.backends[name].requests) for name in "ab"] == [1, 2]
    assert street.common.requests == []
    assert (await street.ask(path, model="c")).error["message"] == "The model `c` does not exist."
    assert (await street.ask(path)).error["message"].endswith("there are: a, b")
    assert (await street.ask(path, model=["a"])).status == 400
    assert [len(street.backends[name].requests) for name in "ab"] == [1, 2]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/"])
async def test_errors_of_the_server_behind_have_the_shape_of_the_api_as_well(path: str) -> None:
    """FastAPI's own have OpenAI's at every path; and they come in parts."""
    street = Street()
    for body in (b'{"error": {"message": "no", "type": "Bad Request"}}', b'{"error": {"type": "x", "message": "no"}}'):
        street.backends["a"].answers = (400, "application/json", body)
        answer = await street.ask(path, model="a")
        assert (answer.status, answer.error) == (400, {"type": "invalid_request_error", "message": "no"})
        assert int(answer.headers["content-length"]) == len(answer.body)
    assert (await street.ask("/v1/messages/batches", model="a")).error["type"] == "not_found_error"
    street.backends["b"].answers = (200, "application/json", b'{"error": {}}')
    assert (await street.ask(path, model="b")).body == b'{"error": {}}'


async def test_the_text_of_tokens_that_the_model_has_not_is_refused() -> None:
    street = Street()
    street.entries["a"].vocabulary = 10
    assert (await street.ask("/detokenize", model="a", tokens=[10])).error["param"] == "tokens"
    assert (await street.ask("/detokenize", model="a", tokens=[9])).body == b"served"
    assert (await street.ask("/detokenize", model="b", tokens=[10])).body == b"served"


async def test_what_concerns_no_single_model_is_answered_without_one() -> None:
    street = Street()
    for path in ("/version", "/docs", "/openapi.json", "/metrics", "/v1/models", "/v1/models/a", "/ping"):
        assert (await street.ask(path, "GET")).status == 200
    assert len(street.common.requests) == 7


@pytest.mark.parametrize("path", GENERATING)
async def test_a_model_that_is_not_ready_is_refused_and_the_other_answers(path: str) -> None:
    street = Street()
    street.why["a"] = "endpoint a is starting"
    refused = await street.ask(path, model="a")
    assert (refused.status, refused.error["message"]) == (503, "endpoint a is starting")
    assert refused.headers["retry-after"] == "2"
    assert (await street.ask(path, model="b")).status == 200
    street.why["a"], street.entries["a"].comes = "endpoint a is failed: no such model", lambda: False
    failed = await street.ask(path, model="a")
    assert (failed.status, failed.error["message"]) == (503, "endpoint a is failed: no such model")
    assert "retry-after" not in failed.headers, "it helps nobody to ask again"


async def test_each_model_has_limits_and_counts_of_its_own() -> None:
    street = Street()
    for backend in street.backends.values():
        backend.open.clear()
    assert (await street.ask("/v1/completions", model="a", n=3)).error["param"] == "n"
    under_way = [asyncio.create_task(street.ask("/v1/completions", model=name, n=2)) for name in "aab"]
    for name, entries in (("a", 2), ("b", 1)):
        for _ in range(entries):
            await street.backends[name].entered.acquire()
    assert [street.entries[name].in_flight.total for name in "ab"] == [4, 2]
    assert [(await street.ask("/v1/completions", model=name)).status for name in "ab"] == [429, 429]
    assert json.loads((await street.ask("/load", "GET")).body) == {"server_load": 3}
    for backend in street.backends.values():
        backend.open.set()
    await asyncio.gather(*under_way)
    assert [street.entries[name].in_flight.total for name in "ab"] == [0, 0]


async def test_a_request_stays_with_the_model_that_it_was_admitted_to() -> None:
    street = Street()
    street.backends["a"].open.clear()
    asked = asyncio.create_task(street.ask("/v1/completions", model="a"))
    await street.backends["a"].entered.acquire()
    after = Backend()
    street.table.replace([ModelEntry(("a",), lambda: None, app=after), street.entries["b"]])
    assert (await street.ask("/v1/completions", model="a")).status == 200
    assert (len(after.requests), street.entries["a"].busy) == (1, True)
    street.backends["a"].open.set()
    assert (await asked).body == b"served"
    assert not street.entries["a"].busy


@pytest.mark.parametrize(
    ("reasons", "status"),
    [((None, None), 200), (("down", None), 200), (("down", "down"), 503)],
)
async def test_the_server_is_healthy_while_a_model_can_answer(reasons: Sequence[str | None], status: int) -> None:
    street = Street()
    street.why = dict(zip("ab", reasons, strict=True))
    answer = await street.ask("/health", "GET")
    assert answer.status == status
    assert status == 200 or answer.error["message"] == "a: down; b: down"


async def test_a_server_without_any_model_is_healthy_and_says_that_it_has_none() -> None:
    street = Street()
    street.table.replace(())
    assert (await street.ask("/health", "GET")).status == 200
    assert (await street.ask("/v1/completions", model="a")).status == 404
    assert (await street.ask("/v1/completions")).status == 400
    assert (await street.ask("/version", "GET")).status == 200


class Clerk:
    """Takes orders, and answers as it is told."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, str, bytes]] = []
        self.answer: tuple[int, bytes] | Refusal = (201, b"{}")

    async def __call__(self, scope: Scope, body: bytes, by: str) -> tuple[int, bytes] | Refusal:
        assert by == "admin-key-file"
        self.orders.append((scope["method"], scope["path"], body))
        return self.answer


ORDERS = [("/v1/endpoints", "POST"), ("/v1/endpoints", "GET"), ("/v1/endpoints/a", "DELETE"), ("/v1/usage", "GET")]


@pytest.mark.parametrize(("path", "method"), ORDERS)
async def test_endpoints_need_the_key_of_an_administrator(path: str, method: str) -> None:
    clerk = Clerk()
    street = Street(api_keys=["plain"], administration=Administration(["master"], clerk))
    assert (await street.ask(path, method)).status == 401
    assert (await street.ask(path, method, key="wrong")).status == 401
    assert (await street.ask(path, method, key="plain")).status == 403
    assert clerk.orders == []
    answer = await street.ask(path, method, key="master")
    assert (answer.status, clerk.orders) == (201, [(method, path, b"{}")])
    clerk.answer = Refusal(409, "it is there", "ConflictError")
    assert (await street.ask(path, method, key="master")).error["message"] == "it is there"
    # It is no key for requests.
    assert (await street.ask("/v1/completions", key="master", model="a")).status == 401


@pytest.mark.parametrize(("path", "method"), ORDERS)
async def test_without_such_keys_the_paths_are_closed_and_say_how_they_are_opened(path: str, method: str) -> None:
    street = Street(api_keys=["plain"])
    for key in ("", "plain"):
        refused = await street.ask(path, method, key=key)
        assert (refused.status, "admin-key-file" in refused.error["message"]) == (403, True)


async def test_what_a_model_does_not_do_is_told_with_what_it_does() -> None:
    street = Street()
    street.entries["a"].paths = frozenset({"/v1/embeddings", "/pooling", "/tokenize", "/health"})
    answer = await street.ask("/v1/completions", model="a-too", prompt="x")
    assert answer.status == 404
    assert (
        answer.error["message"] == "The model `a` does not answer /v1/completions; it answers /v1/embeddings, /pooling."
    )
    assert (await street.ask("/detokenize", model="a", tokens=[1])).status == 404
    assert street.backends["a"].requests == []
    assert (await street.ask("/v1/embeddings", model="a", input="x")).body == b"served"
    assert (await street.ask("/tokenize", model="a", prompt="x")).body == b"served"
    assert (await street.ask("/v1/completions", model="b", prompt="x")).body == b"served"
