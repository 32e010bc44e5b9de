"""Moves middleware from vLLM's application to around the gate: CORS headers and ids of requests.

vLLM puts both into its application, by its own settings. Around the gate, the gate's own answers have them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
