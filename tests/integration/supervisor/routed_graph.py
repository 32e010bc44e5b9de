"""A router and its workers behind a frontend that does nothing, for test_restart.py."""

from __future__ import annotations

from components.router import Router
from components.workers import VllmWorker
from dynamo_local.sdk import Service, depends, service


@service(role="frontend")
class Front(Service):
    """The root."""

    router = depends(Router)


Front.link(Router).link(VllmWorker)
