"""The graph of a chaos run: a router and workers. The frontends run in the harness."""

from __future__ import annotations

from components import router
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.sdk import depends, endpoint, service
from tests.chaos.fleet import VllmWorker


@service(role="router")
class Router(router.Router):
    """The product's router, with an endpoint that returns what is charged in its ledger."""

    workers = depends(VllmWorker)

    @endpoint()
    async def charges(self) -> dict[str, int]:
        """Return the number of charged requests, by frontend."""
        return dict(self._revisions[FIRST_OF_MAIN].routing.ledger.charged)


Router.link(VllmWorker)

__all__ = ["Router"]
