"""A cluster whose node servers are child processes of the server, each with a state folder of its own: for tests.

dynamo serve GRAPH --environment tests.child_nodes:ChildNodes --address a=2,b=2
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from dynamo_local.core.errors import NodeStartError
from dynamo_local.supervisor.places.cluster import ClusterNode, Slot
from dynamo_local.supervisor.places.port import Need
from state.paths import state_root
from tests.memory_cluster import MemoryCluster

_ENDS_WITHIN_S = 60.0


def node_root(root: Path, node: str) -> Path:
    """The state folder of a node, by that of the head."""
    return root.parent / f"{root.name}.{node}"


def pid_file(root: Path, node: str) -> Path:
    """Where the pid of a node server is."""
    return node_root(root, node) / "node.pid"


class ChildNodes(MemoryCluster):
    """A file `dead` in a node's folder has the cluster declare it dead."""

    def __init__(self, sizes: Mapping[str, int], root: Path) -> None:
        super().__init__(sizes, self._start, self._end)
        self.root = root
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    @classmethod
    async def connect(cls, namespace: str, address: str | None) -> ChildNodes:
        pairs = (pair.split("=") for pair in (address or "a=2,b=2").split(","))
        return cls({name: int(size) for name, size in pairs}, state_root(os.environ))

    async def nodes(self) -> Mapping[str, ClusterNode]:
        self.dead = {node for node in self.sizes if (node_root(self.root, node) / "dead").exists()}
        return await super().nodes()

    async def reserve(self, name: str, need: Need, avoid: Collection[str] = ()) -> Slot:
        await self.nodes()
        return await super().reserve(name, need, avoid)

    async def reservations(self) -> Mapping[str, Slot]:
        await self.nodes()
        return await super().reservations()

    async def start_node(self, node: str, order: bytes) -> None:
        process = self.processes.get(node)
        if process is not None and process.returncode is not None:
            self.running.discard(node)
        await super().start_node(node, order)

    async def _start(self, node: str, order: bytes) -> None:
        folder = node_root(self.root, node)
        folder.mkdir(mode=0o700, exist_ok=True)
        log = folder / "node.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dynamo_local.supervisor.node", "--state-dir", str(folder / "state")),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        self.processes[node] = process
        pid_file(self.root, node).write_text(str(process.pid))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(order)
        process.stdin.close()
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        if line != b"ready\n":
            last = (log.read_text().splitlines() or ["its log is empty"])[-1]
            raise NodeStartError(f"node {node}: {last.removeprefix('error: ')}")

    async def _end(self, node: str) -> None:
        process = self.processes.pop(node)
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_ENDS_WITHIN_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
