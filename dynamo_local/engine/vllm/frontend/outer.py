"""What is around the gate: the prefix of a proxy's paths, and middleware of vLLM's application (CORS headers, ids of
requests).

vLLM puts this middleware into its application, by its own settings. Around the gate, the gate's own answers have it as
well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from dynamo_local.core.http.asgi import App, Receive, Scope, Send


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
