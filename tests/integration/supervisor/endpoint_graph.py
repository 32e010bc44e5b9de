"""A router behind a frontend that does nothing, and no workers: those of endpoints come later. For
test_endpoint_processes.py."""

from __future__ import annotations

from components.router import Router
from dynamo_local.sdk import Service, depends, service


@service(role="frontend")
class Front(Service):
    """The root."""

    router = depends(Router)


Front.link(Router)
