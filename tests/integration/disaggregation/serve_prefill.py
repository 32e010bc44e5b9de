"""`dynamo serve` for tiny services one of which takes prefill jobs: `... serve_prefill NAMESPACE [NATS-URL]`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import msgspec

from dynamo_local.cli.console import Console
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.supervisor.server.launch import Launch, external_bus
from dynamo_local.supervisor.server.serve import serve
from dynamo_local.supervisor.server.server import ServerSettings
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
    try:
        serve(prefill_launch(namespace, url), settings, Console())
    except DynamoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
