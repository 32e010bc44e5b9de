"""The graph of `dynamo serve MODEL --disagg`: as aggregated.py, with prefill workers for long prompts."""

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
