"""Several servers of one state folder: `dynamo ls`, `wait`, and the server that a command without a namespace means."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server_process import PATIENCE_S, ServerProcess
from tests.integration.supervisor.scaled_server import COMMAND

pytestmark = pytest.mark.integration

GRAPH = "tests.integration.supervisor.roles_graph:Front"
MOCKERS = ("--VllmWorker.engine=mocker", "--PrefillWorker.engine=mocker")


class Mockers(ServerProcess):
    """A decode worker and a prefill worker, two CPU slots."""

    def __init__(self, root: Path, namespace: str) -> None:
        options = (f"--namespace={namespace}", "--port=0", "--cpu-slots=2")
        super().__init__(root, namespace, ["-m", "dynamo_local.cli.main", "serve", GRAPH, *options, *MOCKERS])

    def command(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command that is given no namespace: exit code, output, errors."""
        done = subprocess.run(
            [*COMMAND, *arguments],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def listed(self) -> dict[str, dict[str, Any]]:
        """The rows of `dynamo ls`, by namespace."""
        code, out, _ = self.command("ls", "--json")
        assert code == 0
        return {row["namespace"]: row for row in json.loads(out)}


def test_a_command_means_the_only_server_that_runs_and_otherwise_asks_which(tmp_path: Path) -> None:
    root = tmp_path / "state"
    with Mockers(root, "one") as one:
        assert one.command("wait", "--workers=2", f"--timeout={PATIENCE_S}")[0] == 0
        assert one.command("ps")[0] == 0
        code, _, error = one.command("wait", "--workers=3", "--timeout=3")
        assert (code, "not ready after 3 s: 2 of 3 workers are ready" in error) == (1, True), error

        with Mockers(root, "two") as two:
            assert two.command("wait", "--namespace=two", f"--timeout={PATIENCE_S}")[0] == 0
            rows = two.listed()
            assert {name: (row["state"], row["workers"]) for name, row in rows.items()} == {
                "one": ("running", 2),
                "two": ("running", 2),
            }
            for arguments in (["ps"], ["stop"], ["logs"], ["events"], ["wait"], ["scale", "VllmWorker=2"]):
                code, _, error = two.command(*arguments)
                assert (code, error) == (
                    2,
                    "error: 2 servers run: one, two; name one by --namespace or DYN_NAMESPACE\n",
                ), arguments

            two.process.send_signal(signal.SIGKILL)
            two.process.wait(PATIENCE_S)
            assert two.command("wait", "--stopped", "--namespace=two", f"--timeout={PATIENCE_S}")[0] == 0

        rows = one.listed()
        assert {name: row["state"] for name, row in rows.items()} == {"one": "running", "two": "crashed"}
        assert rows["two"]["note"] == "`dynamo stop --namespace two` removes what it left"
        assert one.command("ps")[0] == 0
        assert one.command("stop")[0] == 0
        assert one.end() == 0, one.output

        code, _, error = one.command("ps")
        assert code == 2
        assert "no server runs (one that crashed left files in namespace two, which `dynamo stop" in error
        assert one.command("wait", "--stopped")[0] == 0
        code, out, _ = one.command("events", "--kind=server")
        assert code == 0
        assert f"starting {GRAPH}" in out
        assert "stopped" not in out  # of the server that crashed, not of the one that was stopped
        assert one.command("stop")[0] == 0
        assert one.listed() == {}
