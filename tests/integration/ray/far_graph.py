"""Workers behind a root that does nothing: requests come from the test."""

from __future__ import annotations

from components.workers import VllmWorker
from dynamo_local.sdk import Service, depends, service


@service(role="frontend")
class Front(Service):
    """The root."""

    workers = depends(VllmWorker)


Front.link(VllmWorker)
