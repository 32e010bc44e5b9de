"""`dynamo serve` for tiny services: `python -m tests.integration.supervisor.serve_tiny NAMESPACE Service=MODE...`.

The last service is the root and depends on all others. Everything but the graph is the real thing.
$TINY_CIRCUS_DEADLINES_S: seconds until a silent circusd is reported, and until it is killed.
"""

from __future__ import annotations

import os
import sys

import msgspec

from dynamo_local.core.process.restarts import CircusDeadlines
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.server.launch.plan import HttpAddress, Launch, plan_services, service_templates
from dynamo_local.supervisor.server.settings import ServerSettings
from state.devices.allocation import cpu_slots
from state.paths import StatePaths
from tests.integration.supervisor.exit_code import exit_code_of_serving


def tiny_launch(namespace: str, modes: dict[str, str]) -> Launch:
    *others, root = modes
    services = tuple(
        ResolvedService(
            name=name,
            target="tests.integration.supervisor.tiny_service:none",
            role="service",
            workers=1,
            gpu=0,
            cpu=0,
            envs={"TINY": mode},
            config={},
            depends_on=tuple(others) if name == root else (),
        )
        for name, mode in modes.items()
    )
    graph = ResolvedGraph("tests:Tiny", namespace, services)
    paths = StatePaths.of(namespace, os.environ)
    http = HttpAddress("127.0.0.1", 1)
    inventory = cpu_slots((0,), 1)
    command = (sys.executable, "-m", "tests.integration.supervisor.tiny_service")
    templates = tuple(
        msgspec.structs.replace(template, argv=command) for template in service_templates(graph, paths.root, http)
    )
    return Launch(graph, inventory, paths, None, http, templates, plan_services(namespace, templates, inventory))


def main() -> int:
    namespace, *services = sys.argv[1:]
    modes = dict(service.split("=") for service in services)
    deadlines = CircusDeadlines(*map(float, os.environ.get("TINY_CIRCUS_DEADLINES_S", "10 120").split()))
    settings = ServerSettings(ready_deadline_s=120, drain_deadline_s=3, circus_deadlines=deadlines)
    return exit_code_of_serving(tiny_launch(namespace, modes), settings)


if __name__ == "__main__":
    sys.exit(main())
