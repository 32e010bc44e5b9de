"""The graph under fire: a router and its workers. The frontends are the harness's own."""

from __future__ import annotations

from collections import Counter

from components import router
from dynamo_local.sdk import depends, endpoint, service
from tests.chaos.fleet import VllmWorker


@service(role="router")
class Router(router.Router):
    """The router, which here also tells what is charged in its ledger."""

    workers = depends(VllmWorker)

    @endpoint()
    async def charges(self) -> dict[str, int]:
        """Requests charged, by frontend."""
        return dict(Counter(frontend for frontend, _ in self._ledger._charges))


Router.link(VllmWorker)

__all__ = ["Router"]
