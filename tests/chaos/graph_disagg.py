"""The same with prefill workers. The frontends are the harness's own here, too."""

from __future__ import annotations

from dynamo_local.sdk import depends, service
from tests.chaos import graph
from tests.chaos.fleet import PrefillWorker, VllmWorker


@service(role="router")
class Router(graph.Router):
    """It has nothing to do with the prefill workers: it only brings them into the graph."""

    prefill_workers = depends(PrefillWorker)


Router.link(VllmWorker)
Router.link(PrefillWorker)

__all__ = ["Router"]
