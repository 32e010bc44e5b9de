"""`dynamo serve` of endpoints behind an imitated frontend: `python -m tests.integration.endpoints.serve_endpoints
NAMESPACE SLOTS TURN_S`. Everything but the frontend is the real thing. $READY_S: the time that a worker has to become
ready."""

from __future__ import annotations

import os
import sys

import msgspec

from dynamo_local.cli.serving.endpoint_tools import EndpointToolMaker
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.endpoints.start import endpoint_controller
from dynamo_local.supervisor.server.launch.plan import HttpAddress, plan_services, service_templates
from dynamo_local.supervisor.server.launch.prepare import Launch
from dynamo_local.supervisor.server.settings import ServerSettings
from state.devices.allocation import cpu_slots
from state.devices.inventory import usable_cores
from state.paths import StatePaths
from tests.integration.supervisor.exit_code import exit_code_of_serving


def launch(namespace: str, slots: int) -> Launch:
    frontend = ResolvedService(
        name="Frontend",
        target="tests.integration.endpoints.imitated_frontend:none",
        role="frontend",
        workers=1,
        gpu=0,
        cpu=0,
        envs={"IN_FLIGHT": os.environ["IN_FLIGHT"]},
        config={},
        depends_on=(),
    )
    graph = ResolvedGraph("tests:Endpoints", namespace, (frontend,))
    paths, http = StatePaths.of(namespace, os.environ), HttpAddress("127.0.0.1", 1)
    inventory = cpu_slots(usable_cores(), slots)
    command = (sys.executable, "-m", "tests.integration.endpoints.imitated_frontend")
    (template,) = service_templates(graph, paths.root, http)
    templates = (msgspec.structs.replace(template, argv=command),)
    return Launch(graph, inventory, paths, None, http, templates, plan_services(namespace, templates, inventory))


def main() -> int:
    namespace, slots, turn_s = sys.argv[1:]
    ready_s = float(os.environ.get("READY_S", "120"))
    settings = ServerSettings(
        ready_deadline_s=ready_s, drain_deadline_s=5, restart_delay_max_s=0.2, turn_s=float(turn_s)
    )
    launched = launch(namespace, int(slots))
    controller = endpoint_controller(EndpointToolMaker.at_start(launched.inventory), forks=False)
    return exit_code_of_serving(launched, settings, controller)


if __name__ == "__main__":
    sys.exit(main())
