"""Clusters by name: each is imported only where it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.supervisor.places.environments import check_environment, connect


def test_a_server_on_this_machine_imports_nothing_of_a_cluster() -> None:
    program = (
        "import dynamo_local.cli.serving, dynamo_local.supervisor.server.server, sys\n"
        "import dynamo_local.supervisor.server.nodes, dynamo_local.supervisor.node.server\n"
        "print([name for name in sys.modules if name == 'ray' or name.startswith(('ray.', 'dynamo_local.ray'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_environments_are_refused() -> None:
    assert [check_environment(name) for name in ("local", "ray", "a.b:C")] == ["local", "ray", "a.b:C"]
    with pytest.raises(UsageError, match="there are: local, ray; or MODULE:CLASS"):
        check_environment("kubernetes")


@pytest.mark.parametrize("name", ["no.such.module:Cluster", "json:Cluster"])
async def test_what_cannot_be_imported_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(UsageError, match=f"environment {name} cannot be used"):
        await connect(name, "dynamo", None)
