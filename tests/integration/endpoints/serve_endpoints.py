"""`dynamo serve` of endpoints behind an imitated frontend: `python -m tests.integration.endpoints.serve_endpoints
NAMESPACE SLOTS TURN_S`. Everything but the frontend is the real thing. $READY_S: the time that a worker has to become
ready. $NODES: the nodes on which workers live (tests/child_nodes.py); by default on this machine. $MACHINE_FACTS: a
file with what is made up of the machine (`MadeUpMachine`)."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from dynamo_local.cli.output import Console
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.names import Revision
from dynamo_local.core.sizing.machine import GIB
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.endpoints.controller import endpoint_controller
from dynamo_local.supervisor.endpoints.revisions.launch import EndpointLauncher, Launched
from dynamo_local.supervisor.places.capacity import MachineFacts
from dynamo_local.supervisor.server.launch.plan import HttpAddress, Launch, plan_services, service_templates
from dynamo_local.supervisor.server.launch.prepare import without_devices
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.server.settings import ServerSettings
from state.devices.allocation import cpu_slots
from state.devices.inventory import usable_cores
from state.machine.memory import Memory
from state.paths import StatePaths
from tests.integration.supervisor.exit_code import exit_code_of_serving


class MadeUpMachine(msgspec.Struct):
    """What is made up: devices that are gone, each with the reason, and free memory in GiB; None: unknown."""

    gone: dict[int, str] = {}
    free: float | None = None

    @classmethod
    def now(cls) -> MadeUpMachine:
        path = Path(os.environ["MACHINE_FACTS"])
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def memory(self) -> Memory | None:
        return None if self.free is None else Memory(64 * GIB, int(self.free * GIB))


FACTS = MachineFacts(lambda _: MadeUpMachine.now().gone, lambda: MadeUpMachine.now().memory())
WORKER_BYTES, KV_BYTES = 3 * GIB, GIB
"""What each mocker is said to take of the memory."""


class Launcher(EndpointLauncher):
    """Says what a mocker takes of the memory, as of an engine."""

    def prepare(self, revision: Revision, spec: EndpointSpec, report: Report) -> Launched:
        return replace(super().prepare(revision, spec, report), engine_bytes=WORKER_BYTES, kv_bytes=KV_BYTES)


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
    services = plan_services(namespace, templates, inventory)
    nodes = os.environ.get("NODES")
    if nodes is None:
        return Launch(graph, inventory, paths, None, http, templates, services)
    return Launch(
        *(graph, without_devices(inventory), paths, None, http, templates, services),
        environment="tests.child_nodes:ChildNodes",
        cluster_address=nodes,
        devices=inventory,
    )


def main() -> int:
    namespace, slots, turn_s = sys.argv[1:]
    ready_s = float(os.environ.get("READY_S", "120"))
    settings = ServerSettings(
        ready_deadline_s=ready_s, drain_deadline_s=5, restart_delay_max_s=0.2, turn_s=float(turn_s)
    )
    launched = launch(namespace, int(slots))
    launcher = Launcher(launched, Console(), forks=False, memory=FACTS.memory)
    return exit_code_of_serving(launched, settings, endpoint_controller(launcher, FACTS))


if __name__ == "__main__":
    sys.exit(main())
