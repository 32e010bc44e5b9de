"""The graph of a server without a model of its own: it serves endpoints (core/endpoints), whose workers are none of the
graph's, and which its planner scales."""

from __future__ import annotations

from components.frontend.service import Frontend
from components.planner import Planner
from components.router import Router

Frontend.link(Router)
Frontend.link(Planner)

__all__ = ["Frontend"]
