"""`dynamo serve` of device_graph.py on GPUs that are there by name only:
`python -m tests.integration.supervisor.serve_devices NAMESPACE GPU-UUID...`.

$SERVE_OPTIONS holds options of services, separated by spaces.
"""

from __future__ import annotations

import os
import sys

from dynamo_local.sdk import load_graph
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.supervisor.server.launch.plan import HttpAddress, Launch, service_templates
from dynamo_local.supervisor.server.settings import ServerSettings
from state.devices.allocation import Device, Inventory
from state.paths import StatePaths
from tests.integration.supervisor.exit_code import exit_code_of_serving


def main() -> int:
    namespace, *uuids = sys.argv[1:]
    inventory = Inventory("gpu", tuple(Device(i, "gpu", "H100", uuid=uuid) for i, uuid in enumerate(uuids)))
    options = os.environ.get("SERVE_OPTIONS", "").split()
    graph = resolve(load_graph("tests.integration.supervisor.device_graph:Front"), None, options, namespace)
    paths, http = StatePaths.of(namespace, os.environ), HttpAddress("127.0.0.1", 1)
    launch = Launch(graph, inventory, paths, None, http, service_templates(graph, paths.root, http), ())
    return exit_code_of_serving(
        launch, ServerSettings(ready_deadline_s=120, drain_deadline_s=3, restart_delay_max_s=0.2)
    )


if __name__ == "__main__":
    sys.exit(main())
