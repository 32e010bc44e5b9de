"""The paths of administrators: which part of the frontend carries out what is asked for there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_local.core.http.admission import Refusal

Orders = Callable[[str, str, bytes, str], Awaitable[tuple[int, bytes] | Refusal]]
"""Carries out a request of an administrator: method, path, body, and the name of the key of who asks. Returns
status and body of the answer."""

Reports = Callable[[bytes], Awaitable[tuple[int, bytes] | Refusal]]
"""Tells what was used, as a query string asks for. Returns status and body of the answer."""


@dataclass(frozen=True)
class Administration:
    """`keys`: those of a file that open the paths, beside keys of administrators in the registry. `orders`: by the
    beginning of the path. `usage`: tells what was used."""

    keys: Sequence[str] = ()
    orders: Mapping[str, Orders] = field(default_factory=dict)
    usage: Reports | None = None

    def at(self, path: str) -> Orders:
        """Return what carries out requests at a path of administrators."""
        return next(orders for beginning, orders in self.orders.items() if path.startswith(beginning))

    async def tell_usage(self, query: bytes) -> tuple[int, bytes] | Refusal:
        """Tell an administrator what was used."""
        assert self.usage is not None, "a frontend that has administrators tells usage"
        return await self.usage(query)


NO_ADMINISTRATION = Administration()
"""The paths are closed."""
