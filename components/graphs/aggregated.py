"""The graph of `dynamo serve MODEL`: a router and a planner, and workers that prefill and decode."""

from __future__ import annotations

from components.frontend.service import Frontend
from components.planner import Planner
from components.router import Router
from components.workers import VllmWorker

Frontend.link(Router).link(VllmWorker)
Frontend.link(Planner).link(VllmWorker)

__all__ = ["Frontend"]
