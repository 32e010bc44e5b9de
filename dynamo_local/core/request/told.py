"""What a client knows of a request's id."""

from __future__ import annotations

import re

_ID = re.compile(r"(?:\d+_)?(?P<told>cmpl-.*(?=-\d+-)|(?!cmpl-).*)(?:-\d+)?-[0-9a-f]{8}")
"""A request id as vLLM's OpenAI server makes it. `told` is the part that the client knows; each choice and each prompt
of a client's request has an id of its own."""


def told_id(request_id: str) -> str:
    """The part of a request id that the client knows."""
    match = _ID.fullmatch(request_id)
    return request_id if match is None else match["told"]
