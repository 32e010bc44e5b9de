"""Disaggregated serving: prefill workers compute long prompts, and decode workers read the KV from them.

dynamo serve examples.llm.graphs.disagg:Frontend -f examples/llm/configs/disagg.yaml
"""

from __future__ import annotations

from components.frontend.service import Frontend
from components.planner import Planner
from components.router import Router
from components.workers import PrefillWorker, VllmWorker

Frontend.link(Router).link(VllmWorker)
Frontend.link(PrefillWorker)
Frontend.link(Planner).link(VllmWorker)
Planner.link(PrefillWorker)

__all__ = ["Frontend"]
