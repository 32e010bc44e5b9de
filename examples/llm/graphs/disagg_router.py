"""The graph of `disagg` under the name that NVIDIA Dynamo has for disaggregated serving with a router.

dynamo serve examples.llm.graphs.disagg_router:Frontend -f examples/llm/configs/disagg_router.yaml
"""

from __future__ import annotations

from components.frontend.service import Frontend
from components.planner import Planner
from components.router import Router
from components.workers import PrefillWorker, VllmWorker

# Links belong to the module that makes them, so those of `disagg` are repeated.
Frontend.link(Router).link(VllmWorker)
Frontend.link(PrefillWorker)
Frontend.link(Planner).link(VllmWorker)
Planner.link(PrefillWorker)

__all__ = ["Frontend"]
