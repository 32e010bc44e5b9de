"""What a node server imports: the first worker of a node waits for it."""

from __future__ import annotations

import subprocess
import sys

OF_THE_HEAD = (
    "dynamo_local.model.obtain",
    "dynamo_local.sdk.config.configuration",
    "dynamo_local.supervisor.actuator.actuator",
    "dynamo_local.supervisor.admin.handlers",
    "dynamo_local.supervisor.places.cluster",
    "dynamo_local.supervisor.server.launch.prepare",
    "dynamo_local.supervisor.server.server",
    "yaml",
)


def test_a_node_server_imports_nothing_of_the_head() -> None:
    code = f"import sys, dynamo_local.supervisor.node.server; print([n for n in {OF_THE_HEAD!r} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_node_server_starts_its_circusd_before_it_imports() -> None:
    code = "import sys, dynamo_local.supervisor.node.__main__; print('asyncio' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
