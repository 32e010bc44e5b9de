"""What clients see of vLLM's application beside its answers: prefix, layers, added routes, description, and what is
said of an invalid body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dynamo_local import __version__
from dynamo_local.core.http.asgi import App, Receive, Scope, Send
from dynamo_local.core.http.paths import MODEL_PREFIX, route_of, unknown_model
from dynamo_local.model.hub.cache import repo_of_snapshot

# What is around the gate: the prefix of a proxy's paths, and middleware of vLLM's application (CORS headers, ids of
# requests).
#
# vLLM puts this middleware into its application, by its own settings. Around the gate, the gate's own answers have it
# as well.


def take_outer(app: Any) -> Callable[[Any], Any]:
    """Take the middleware off the application. Returns a function that puts it around another application."""
    from starlette.middleware.cors import CORSMiddleware
    from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware

    taken = [layer for layer in app.user_middleware if layer.cls in (CORSMiddleware, XRequestIdMiddleware)]
    app.user_middleware = [layer for layer in app.user_middleware if layer not in taken]
    # Built anew at the first request.
    app.middleware_stack = None

    def around(inner: Any) -> Any:
        for layer in reversed(taken):
            inner = layer.cls(inner, *layer.args, **layer.kwargs)
        return inner

    return around


def root_of(path: str | None) -> str:
    """Return the prefix that `root-path` asks for: it begins with a slash, or is empty."""
    inner = (path or "").strip("/")
    return f"/{inner}" if inner else ""


def under(root: str, app: App) -> App:
    """Return an application that answers at each path with the prefix `root` and without it.

    The prefix is removed once, before any layer has seen the path: what judges a path (the gate) and what routes by it
    see the same one. Behind this, no layer knows of a prefix.
    """
    if not root:
        return app

    async def without_root(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == root or path.startswith(f"{root}/"):
            # The raw path cannot be cut at the same place: it may write letters of the prefix as %XX.
            rest = path.removeprefix(root) or "/"
            scope = {**scope, "path": rest, "raw_path": quote(rest).encode()}
        await app(scope, receive, send)

    return without_root


# Routes that are added to vLLM's application: one model by its name, and a description of the open paths.
#
# The gate's own list says which paths are open (core/http/paths.py).


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
    from fastapi.openapi.utils import get_openapi

    routes = [route for route in app.routes if _is_open(route)]
    servers = [{"url": root}] if root else None
    return json.dumps(get_openapi(title="dynamo-local", version=__version__, routes=routes, servers=servers)).encode()


def _is_open(route: Any) -> bool:
    open_here = route_of(getattr(route, "path", ""))
    return open_here is not None and set(getattr(route, "methods", None) or ()) <= open_here.methods | {"HEAD"}


# What is wrong with the body of a request, told in sentences.

_MOST_TOLD, _MOST_READ = 10, 1000
_SHOWN = 60
_KINDS = ("Value error, ", "Assertion failed, ")
"""Begin what pydantic says of errors that a validator has raised."""
_NAMED = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})
"""Kinds of errors that are told by pydantic's name as well, which clients look for."""


def tell_invalid_bodies(app: Any) -> None:
    """Have the application tell in sentences what is wrong with a body: vLLM answers with Python's text of pydantic's
    records."""
    from fastapi.exceptions import RequestValidationError
    from starlette.responses import JSONResponse
    from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler

    async def answer(request: Any, error: Any) -> JSONResponse:
        answered = await validation_exception_handler(request, error)
        content = json.loads(answered.body)
        content["error"]["message"] = in_sentences(error.errors())
        return JSONResponse(content, answered.status_code)

    app.add_exception_handler(RequestValidationError, answer)


def in_sentences(errors: Sequence[Any]) -> str:
    """Return what is wrong with a body. `errors`: pydantic's, or texts."""
    from vllm.entrypoints.serve.exception_handling.utils import sanitize_message

    said = list(dict.fromkeys(map(_in_words, errors[:_MOST_READ])))
    more = "; and more" if len(said) > _MOST_TOLD or len(errors) > _MOST_READ else ""
    told: str = sanitize_message("; ".join(said[:_MOST_TOLD]) + more)
    return told or "the body is not valid"


def _in_words(error: Any) -> str:
    from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param

    if not isinstance(error, dict):
        return str(error)
    if error.get("type") == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']} (character {error['loc'][-1]})"
    why, place = str(error.get("msg")), clean_loc_for_param(tuple(error.get("loc", ()))).removeprefix("body.")
    for kind in _KINDS:
        why = why.removeprefix(kind)
    given = error.get("input")
    if given is None or isinstance(given, str | int | float):
        shown = json.dumps(given[:_SHOWN] if isinstance(given, str) else given)[: _SHOWN + 2]
        why = f"{why}, got {shown}"
    if error.get("type") in _NAMED:
        why = f"{why} ({error['type']})"
    return why if why.startswith(place) else f"{place}: {why}"
