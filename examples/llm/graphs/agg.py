"""Aggregated serving: the frontend distributes requests over workers that prefill and decode.

dynamo serve examples.llm.graphs.agg:Frontend -f examples/llm/configs/agg.yaml
"""

from __future__ import annotations

from components.frontend.service import Frontend
from components.planner import Planner
from components.workers import VllmWorker

Frontend.link(VllmWorker)
Frontend.link(Planner).link(VllmWorker)

__all__ = ["Frontend"]
