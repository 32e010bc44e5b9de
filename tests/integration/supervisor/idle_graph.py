"""Workers that do nothing, as far as a node server can see, for test_node_server.py."""

from __future__ import annotations

from dynamo_local.sdk import Service, depends, service


@service(role="decode", resources={"gpu": 1})
class Idle(Service):
    """A worker."""


@service(role="frontend")
class Front(Service):
    """The root."""

    workers = depends(Idle)


Front.link(Idle)
