"""`dynamo serve` of a graph, whose endpoints' workers are changed as a test orders: `python -m
tests.integration.supervisor.serve_by_hand GRAPH NAMESPACE SLOTS`. Everything but the controller is the real thing."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec

from dynamo_local.control.operations import DELETE_ENDPOINT, SCALE_ENDPOINT, Call
from dynamo_local.core.names import endpoint_of
from dynamo_local.core.planning.actions import Action, DeviceLimits
from dynamo_local.supervisor.server.controlled import ControlledServer
from dynamo_local.supervisor.server.launch.plan import HttpAddress
from dynamo_local.supervisor.server.launch.prepare import prepare
from dynamo_local.supervisor.server.launch.request import ServeRequest
from dynamo_local.supervisor.server.settings import ServerSettings
from tests.integration.supervisor.exit_code import exit_code_of_serving


class Changes(msgspec.Struct):
    changes: list[Action]


async def controller(server: ControlledServer) -> None:
    """SCALE_ENDPOINT makes the changes of an endpoint that its body has, DELETE_ENDPOINT ends the revision that it
    names."""

    async def change(call: Call) -> list[tuple[str | None, bool]]:
        actuator = await server.actuators.of(call.names["name"], server.report)
        outcomes = await actuator.apply_all(call.content(Changes).changes, DeviceLimits())
        return [(outcome.watcher, outcome.done) for outcome in outcomes]

    async def end(call: Call) -> Any:
        revision = call.names["name"]
        actuator = await server.actuators.of(endpoint_of(revision), server.report)
        return await actuator.end_revision(revision)

    server.control.take({SCALE_ENDPOINT: change, DELETE_ENDPOINT: end})
    await asyncio.Event().wait()


def main() -> int:
    graph, namespace, slots = sys.argv[1:]
    request = ServeRequest(graph, namespace=namespace, cpu_slots=int(slots))
    launch = prepare(request, HttpAddress("127.0.0.1", 0), os.environ)
    return exit_code_of_serving(launch, ServerSettings(ready_deadline_s=120, drain_deadline_s=30), controller)


if __name__ == "__main__":
    sys.exit(main())
