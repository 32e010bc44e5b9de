"""`dynamo serve` for tiny services one of which takes prefill jobs: `... serve_prefill NAMESPACE [NATS-URL]`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import msgspec

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.supervisor.server.launch.addresses import external_bus
from dynamo_local.supervisor.server.launch.plan import Launch
from dynamo_local.supervisor.server.settings import ServerSettings
from tests.integration.supervisor.exit_code import exit_code_of_serving
from tests.integration.supervisor.serve_tiny import tiny_launch

CONFIGURED_SIZE = 5


def prefill_launch(namespace: str, url: str | None) -> Launch:
    launch = tiny_launch(namespace, {"Prefill": "", "Front": ""})
    prefill, front = launch.graph.services
    services = (
        msgspec.structs.replace(prefill, role=PREFILL_ROLE),
        msgspec.structs.replace(front, config={"max-prefill-queue-size": CONFIGURED_SIZE}),
    )
    graph = msgspec.structs.replace(launch.graph, services=services)
    return replace(launch, graph=graph, bus=external_bus(url, os.environ))


def main() -> int:
    namespace, url = (*sys.argv[1:], None)[:2]
    assert namespace is not None
    settings = ServerSettings(ready_deadline_s=120, drain_deadline_s=3)
    return exit_code_of_serving(prefill_launch(namespace, url), settings)


if __name__ == "__main__":
    sys.exit(main())
