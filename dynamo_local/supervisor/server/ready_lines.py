"""What `dynamo serve` says once all services are ready: where the API is, and what can be done next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence


def ready_lines(url: str | None, summary: str, models: Sequence[str]) -> list[str]:
    """Return the lines. `url` is the address of the API, None for a graph without one. `summary`: what is served, in
    words. `models`: the names that requests may give."""
    if url is None:
        return [f"all services ready ({summary})", _COMMANDS]
    lines = [f"API ready at {url} ({summary})"]
    if models:
        body = json.dumps({"model": models[0], "messages": [{"role": "user", "content": "Hello"}]})
        lines += [
            f"  try it   curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
            f"             -d {shlex.quote(body)}",
        ]
    return [*lines, _COMMANDS]


_COMMANDS = "  look     dynamo ps, dynamo top, dynamo logs -f\n  stop     Ctrl-C here, or dynamo stop elsewhere"
