"""A server of mockers whose workers come and go, and commands on it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from state.statefile.model import Component
from tests.integration.server_process import PATIENCE_S, ServerProcess

NAMESPACE = "scaled"
COMMAND = [sys.executable, "-m", "dynamo_local.cli.main"]

DIES = ("/bin/sh", "-c", "echo 'error: no memory left on the device' >&2; exit 1")
HANGS = ("/bin/sleep", "600")


class ScaledServer(ServerProcess):
    """Without a graph of its own: a decode worker and a prefill worker, four CPU slots."""

    def __init__(
        self, root: Path, graph: str = "tests.integration.supervisor.roles_graph:Front", *options: str
    ) -> None:
        engines = ["--VllmWorker.engine=mocker", *(options or ("--PrefillWorker.engine=mocker",))]
        arguments = ["serve", graph, f"--namespace={NAMESPACE}", "--port=0", "--cpu-slots=4", *engines]
        super().__init__(root, NAMESPACE, ["-m", "dynamo_local.cli.main", *arguments])
        self.await_start()

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command on this server."""
        return subprocess.Popen(
            [*COMMAND, *arguments, f"--namespace={NAMESPACE}"],
            env=dict(self.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def command(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command on this server: exit code, output, errors."""
        process = self.begin(*arguments)
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        return process.returncode, out, err

    def ends_well(self) -> None:
        """Stop the server, and check that it ends in order and leaves nothing, whatever was added and removed."""
        self.signal(signal.SIGTERM)
        assert self.end() == 0, self.output
        self.assert_nothing_left()

    def workers(self) -> dict[str, tuple[int, ...] | None]:
        """Workers and templates: watcher without its namespace to devices; None for a template."""
        components = self.state().components
        return {
            name.removeprefix(f"{NAMESPACE}_"): c.resources.allocated_gpus
            for name, c in components.items()
            if "Worker" in name
        }

    def entry(self, name: str) -> Component | None:
        return self.state().components.get(f"{NAMESPACE}_{name}")

    def settled(self) -> bool:
        """Whether no change is under way."""
        return all(component.phase is None for component in self.state().components.values())

    def watchers(self) -> dict[str, str]:
        """circus' watchers and their statuses."""

        async def ask() -> dict[str, str]:
            async with CircusClient(self.state().circus_endpoint) as circus:
                return await circus.statuses()

        return asyncio.run(ask())

    def consistent(self) -> bool:
        """Whether statefile, circus and the processes tell the same."""
        components = self.state().components
        holding = {name for name, component in components.items() if component.holds}
        running = {process.environ["DYN_WATCHER"] for process in self.processes()}
        return self.settled() and set(self.watchers()) == holding == running

    def workers_are_made_by(self, argv: tuple[str, ...]) -> None:
        """Have further workers run another program."""
        path = self.paths.blueprint_file
        blueprint = Blueprint.read(self.paths)
        templates = tuple(msgspec.structs.replace(template, argv=argv) for template in blueprint.templates)
        msgspec.structs.replace(blueprint, templates=templates).write(path)


def phase_of(server: ScaledServer, name: str) -> Callable[[], str | None]:
    """Tells the phase of a worker, None too if there is none."""

    def phase() -> str | None:
        entry = server.entry(name)
        return entry.phase if entry is not None else None

    return phase
