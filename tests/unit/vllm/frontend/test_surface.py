"""Routes beside vLLM's own, on an application that has a few like them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dynamo_local.engine.vllm.frontend.surface import describe_what_is_open, name_roots, show_one_model

fastapi = pytest.importorskip("fastapi", reason="FastAPI comes with vLLM")


class Card(SimpleNamespace):
    def model_dump(self) -> dict[str, Any]:
        return dict(vars(self))


@pytest.fixture
async def client() -> Any:
    app = fastapi.FastAPI()

    async def show_available_models() -> Any:
        return SimpleNamespace(data=[Card(id="org/base", parent=None), Card(id="pirate", parent="org/base")])

    async def nothing() -> None:
        return None

    app.state.openai_serving_models = SimpleNamespace(show_available_models=show_available_models)
    for path, methods in {"/v1/completions": ["POST"], "/sleep": ["POST"], "/ping": ["GET"]}.items():
        app.add_api_route(path, nothing, methods=methods)
    app.add_api_route("/health", nothing, methods=["PUT"])
    show_one_model(app)
    describe_what_is_open(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        yield client


async def test_each_model_is_told_by_its_name(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models/org%2Fbase")).json() == {"id": "org/base", "parent": None}
    assert (await client.get("/v1/models/org/base")).json() == {"id": "org/base", "parent": None}
    assert (await client.get("/v1/models/pirate")).json() == {"id": "pirate", "parent": "org/base"}
    for name in ("org", "base", "Pirate", "pirate/", "%00"):
        refused = await client.get(f"/v1/models/{name}")
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "NotFoundError")


async def test_the_description_has_what_is_open_and_nothing_else(client: httpx.AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()
    assert described["info"]["title"] == "dynamo-local"
    assert {path: sorted(methods) for path, methods in described["paths"].items()} == {
        "/v1/completions": ["post"],
        "/ping": ["get"],
        "/v1/models/{model}": ["get"],
    }
    assert (await client.get("/openapi.json")).json() == described


def test_roots_of_hub_models_are_ids_and_others_are_as_vllm_gives_them() -> None:
    given = [
        f"/home/me/hub/models--org--my--name/snapshots/{'0a' * 20}",
        "/models/mine",
        "/x/models--a--b/snapshots/v1",
    ]
    paths = [SimpleNamespace(name="served", model_path=path) for path in given]
    name_roots(SimpleNamespace(state=SimpleNamespace(openai_serving_models=SimpleNamespace(base_model_paths=paths))))
    assert [path.model_path for path in paths] == ["org/my--name", *given[1:]]
