"""What `dynamo serve` says once all services are ready: where the API is, and what can be done next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dynamo_local.core.messages.endpoints import EndpointView

_EXAMPLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "generate": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    "embed": ("/v1/embeddings", {"input": "Hello"}),
    "classify": ("/classify", {"input": "Hello"}),
    "token_embed": ("/pooling", {"input": "Hello"}),
    "token_classify": ("/pooling", {"input": "Hello"}),
}
"""A path and a body for each task of engines; for an engine with several, the first."""

_ANSWERS = frozenset({"ready", "updating", "parked", "asleep", "waking"})
_MOST_NAMED = 8
"""Endpoints that are named; the others are only counted."""


def ready_lines(
    url: str | None,
    summary: str,
    models: Sequence[str],
    tasks: Collection[str] = ("generate",),
    endpoints: Sequence[EndpointView] = (),
) -> list[str]:
    """Return the lines. `url` is the address of the API, None for a graph without one. `summary`: what is served, in
    words. `models`: the names that requests may give for the graph's own model, and `tasks` those of its engines.
    `endpoints`: as they are now; some may still come up."""
    if url is None:
        return [f"all services ready ({summary})", _COMMANDS]
    lines = [f"API ready at {url} ({summary})", *_endpoint_lines(endpoints)]
    ready = [view.spec.name for view in endpoints if view.status.state in _ANSWERS]
    example = next((example for task, example in _EXAMPLES.items() if task in tasks), None)
    if models and example is not None:
        lines += _try_it(url, example, models[0])
    elif ready and not models:
        lines += _try_it(url, _EXAMPLES["generate"], ready[0])
    elif endpoints:
        lines.append(f"  try it   curl {url}/v1/models lists those that are ready")
    return [*lines, _COMMANDS]


def _endpoint_lines(endpoints: Sequence[EndpointView]) -> list[str]:
    """The first endpoints with their states, and the commands for them."""
    if not endpoints:
        return []
    shown = [f"{view.spec.name} ({view.status.state})" for view in endpoints[:_MOST_NAMED]]
    if len(endpoints) > len(shown):
        shown.append(f"and {len(endpoints) - len(shown)} more")
    return [
        f"  models   {', '.join(shown)}",
        "           dynamo endpoint list, dynamo wait NAME, dynamo endpoint create NAME --model MODEL",
    ]


def _try_it(url: str, example: tuple[str, Mapping[str, Any]], model: str) -> list[str]:
    path, asked = example
    body = json.dumps({"model": model, **asked})
    return [
        f"  try it   curl {url}{path} -H 'Content-Type: application/json' \\",
        f"             -d {shlex.quote(body)}",
    ]


_COMMANDS = "  look     dynamo ps, dynamo top, dynamo logs -f\n  stop     Ctrl-C here, or dynamo stop elsewhere"
