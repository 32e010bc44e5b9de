"""Workers of both roles behind a frontend that does nothing, for test_roles.py."""

from __future__ import annotations

from components.workers import PrefillWorker, VllmWorker
from dynamo_local.sdk import Service, depends, service


@service(role="frontend")
class Front(Service):
    """The root."""

    workers = depends(VllmWorker)
    prefill_workers = depends(PrefillWorker)


Front.link(VllmWorker)
Front.link(PrefillWorker)
