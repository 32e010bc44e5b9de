"""The graph of a chaos run with prefill workers."""

from __future__ import annotations

from dynamo_local.sdk import depends, service
from tests.chaos import graph
from tests.chaos.fleet import PrefillWorker, VllmWorker


@service(role="router")
class Router(graph.Router):
    """The router of graph.py. Its dependency only brings the prefill workers into the graph."""

    prefill_workers = depends(PrefillWorker)


Router.link(VllmWorker)
Router.link(PrefillWorker)

__all__ = ["Router"]
