"""The paths that the frontend answers itself: which part of it carries out what is asked for there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.paths import USAGE

Orders = Callable[[str, str, bytes, str], Awaitable[tuple[int, bytes] | Refusal]]
"""Carries out a request of an administrator: method, path, body, and the name of the key of who asks. Returns
status and body of the answer."""

Reports = Callable[[bytes], Awaitable[tuple[int, bytes] | Refusal]]
"""Tells what was used, as a query string asks for. Returns status and body of the answer."""

Handler = Callable[[Scope, Receive, Send], Awaitable[Refusal | None]]
"""Answers a request, or returns why not."""

_Part = TypeVar("_Part")


def at(parts: Mapping[str, _Part], path: str) -> _Part:
    """Return the part that answers at an open path. `parts`: by the beginning of their paths."""
    return next(part for beginning, part in parts.items() if path.startswith(beginning))


@dataclass(frozen=True)
class Administration:
    """`keys`: those of a file that open the paths, beside keys of administrators in the registry. `orders`: by the
    beginning of the path. `usage`: tells what was used."""

    keys: Sequence[str] = ()
    orders: Mapping[str, Orders] = field(default_factory=dict)
    usage: Reports | None = None

    async def carry_out(self, scope: Scope, body: bytes, by: str) -> tuple[int, bytes] | Refusal:
        """Have the part whose path it is answer an administrator. `by`: the name of the key of who asks."""
        path = scope["path"]
        if path == USAGE:
            assert self.usage is not None, "a frontend that has administrators tells usage"
            return await self.usage(scope.get("query_string", b""))
        return await at(self.orders, path)(scope["method"], path, body, by)


NO_ADMINISTRATION = Administration()
"""The paths are closed."""

NO_STORES: Mapping[str, Handler] = MappingProxyType({})
"""Nothing is stored."""
