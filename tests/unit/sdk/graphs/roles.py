"""Services whose roles depend on what else is in the graph."""

from __future__ import annotations

from dynamo_local.sdk import Service, depends, service


@service(role="worker", role_beside={"helper": "leader", "boss": "follower"})
class Worker(Service):
    """Alone, a worker."""


@service(role="helper")
class Helper(Service):
    """Makes the worker a leader."""


@service(role="boss")
class Boss(Service):
    """Makes the worker a follower."""


@service()
class Front(Service):
    worker = depends(Worker)
    helper = depends(Helper)
    boss = depends(Boss)
