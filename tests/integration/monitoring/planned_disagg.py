"""Workers of both roles and a planner behind a frontend that does nothing, for test_planner.py."""

from __future__ import annotations

from components.planner import Planner
from components.workers import PrefillWorker, VllmWorker
from dynamo_local.sdk import Service, depends, service


@service(role="frontend")
class Front(Service):
    """The root."""

    workers = depends(VllmWorker)
    prefill_workers = depends(PrefillWorker)
    planner = depends(Planner)


Front.link(Planner).link(VllmWorker)
Front.link(PrefillWorker)
Planner.link(PrefillWorker)
