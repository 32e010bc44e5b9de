"""Routes that are added to vLLM's application: one model by its name, and a description of the open paths.

The gate's own list says which paths are open (core/http/paths.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from dynamo_local import __version__
from dynamo_local.core.http.models import unknown_model
from dynamo_local.core.http.paths import MODEL_PREFIX, route_of
from dynamo_local.model.hub.cache import repo_of_snapshot


def add_routes(app: Any) -> None:
    """Add the routes. Call once the application has all of vLLM's routes."""
    show_one_model(app)
    if app.openapi_url is not None:
        describe_what_is_open(app)


def name_roots(app: Any) -> None:
    """Have the field `root` of models from the hub be their ids there. vLLM is given their folders in the cache, and
    would tell clients how this machine is arranged."""
    for path in app.state.openai_serving_models.base_model_paths:
        path.model_path = repo_of_snapshot(Path(path.model_path)) or path.model_path


def show_one_model(app: Any) -> None:
    """Open a path for each model that the application lists, adapters included."""
    from starlette.responses import JSONResponse, Response

    async def show_model(model: str) -> Any:
        """Answer with one of the models that /v1/models lists."""
        listed = await app.state.openai_serving_models.show_available_models()
        found = next((card for card in listed.data if card.id == model), None)
        if found is not None:
            return JSONResponse(found.model_dump())
        refusal = unknown_model(model)
        return Response(refusal.body(), refusal.status, media_type="application/json")

    app.add_api_route(MODEL_PREFIX + "{model:path}", show_model, methods=["GET"], response_model=None)


def describe_what_is_open(app: Any) -> None:
    """Replace the route of the description. It is made when it is first asked for, in a thread: that takes long."""
    from starlette.responses import Response

    url = app.openapi_url
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) != url]
    making: asyncio.Task[bytes] | None = None

    async def describe(_: Any) -> Response:
        nonlocal making
        if making is None:
            making = asyncio.create_task(asyncio.to_thread(_description, app), name="openapi")
        return Response(await asyncio.shield(making), media_type="application/json")

    app.add_route(url, describe, include_in_schema=False)


def _description(app: Any) -> bytes:
    import json

    from fastapi.openapi.utils import get_openapi

    routes = [route for route in app.routes if _is_open(route)]
    return json.dumps(get_openapi(title="dynamo-local", version=__version__, routes=routes)).encode()


def _is_open(route: Any) -> bool:
    open_here = route_of(getattr(route, "path", ""))
    return open_here is not None and set(getattr(route, "methods", None) or ()) <= open_here.methods | {"HEAD"}
