"""Routes that are added to vLLM's application: one model by its name, and a description of the open paths.

The gate's own list says which paths are open (core/http/paths.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from dynamo_local import __version__
from dynamo_local.core.http.paths import MODEL_PREFIX, route_of, unknown_model
from dynamo_local.model.hub.cache import repo_of_snapshot


def add_routes(app: Any, root: str = "") -> None:
    """Add the routes. Call once the application has all of vLLM's routes. `root`: prefix of all paths as clients of a
    proxy write them."""
    show_one_model(app)
    if app.openapi_url is not None:
        if root:
            _show_docs_under(app, root)
        describe_what_is_open(app, root)


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


def _show_docs_under(app: Any, root: str) -> None:
    """Replace the page of the documentation by one that loads its parts from behind a proxy."""
    from fastapi.openapi.docs import get_swagger_ui_html

    page = get_swagger_ui_html(
        openapi_url=f"{root}{app.openapi_url}",
        title=f"{app.title} - Swagger UI",
        swagger_js_url=f"{root}/static/swagger-ui-bundle.js",
        swagger_css_url=f"{root}/static/swagger-ui.css",
    )
    _replace_route(app, "/docs", lambda _: page)


def _replace_route(app: Any, path: str, answer: Any) -> None:
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) != path]
    app.add_route(path, answer, include_in_schema=False)


def describe_what_is_open(app: Any, root: str = "") -> None:
    """Replace the route of the description. It is made when it is first asked for, in a thread: that takes long."""
    from starlette.responses import Response

    making: asyncio.Task[bytes] | None = None

    async def describe(_: Any) -> Response:
        nonlocal making
        if making is None:
            making = asyncio.create_task(asyncio.to_thread(_description, app, root), name="openapi")
        return Response(await asyncio.shield(making), media_type="application/json")

    _replace_route(app, app.openapi_url, describe)


def _description(app: Any, root: str) -> bytes:
    import json

    from fastapi.openapi.utils import get_openapi

    routes = [route for route in app.routes if _is_open(route)]
    servers = [{"url": root}] if root else None
    return json.dumps(get_openapi(title="dynamo-local", version=__version__, routes=routes, servers=servers)).encode()


def _is_open(route: Any) -> bool:
    open_here = route_of(getattr(route, "path", ""))
    return open_here is not None and set(getattr(route, "methods", None) or ()) <= open_here.methods | {"HEAD"}
