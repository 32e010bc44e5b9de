"""Aggregated serving with a router, which assigns the requests of all frontends.

dynamo serve examples.llm.graphs.agg_router:Frontend -f examples/llm/configs/agg_router.yaml
"""

from __future__ import annotations

from components.frontend.service import Frontend
from components.planner import Planner
from components.router import Router
from components.workers import VllmWorker

Frontend.link(Router).link(VllmWorker)
Frontend.link(Planner).link(VllmWorker)

__all__ = ["Frontend"]
