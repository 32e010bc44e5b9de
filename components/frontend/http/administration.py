"""The paths that the frontend answers itself: which part of it carries out what is asked for there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import Refusal

Orders = Callable[[Scope, bytes, str], Awaitable[tuple[int, bytes] | Refusal]]
"""Carries out a request of an administrator: its scope, its body, and the name of the key of who asks. Returns status
and body of the answer."""

Handler = Callable[[Scope, Receive, Send], Awaitable[Refusal | None]]
"""Answers a request, or returns why not."""

_Part = TypeVar("_Part")


def at(parts: Mapping[str, _Part], path: str) -> _Part:
    """Return the part that answers at an open path. `parts`: by the beginning of their paths."""
    return next(part for beginning, part in parts.items() if path.startswith(beginning))


async def _nothing(scope: Scope, body: bytes, by: str) -> Refusal:
    return Refusal(404, f"no such path: {scope['path']}", "NotFoundError")


@dataclass(frozen=True)
class Administration:
    """`keys`: those of a file that open the paths, beside keys of administrators in the registry. `orders`: carries out
    what they ask for."""

    keys: Sequence[str] = ()
    orders: Orders = _nothing


NO_ADMINISTRATION = Administration()
"""The paths are closed."""

NO_STORES: Mapping[str, Handler] = MappingProxyType({})
"""Nothing is stored."""
