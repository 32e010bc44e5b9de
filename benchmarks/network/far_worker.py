"""A worker of a running server, in whichever network namespace this is started: there it is on a machine of its own.

    python -m benchmarks.network.far_worker NAMESPACE CORE

with the server's state directory in the environment. It has the configuration of the server's own workers, says
"ready", and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from pathlib import Path

from components.workers.worker import VllmWorker
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import Announcer
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import FIRST_OF_MAIN, Watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.tasks import TaskGuard
from state.devices.allocation import CPU_CORES_VARIABLE
from state.machine.identity import machine_id
from state.paths import StatePaths

SERVICE = "VllmWorker"
_INDEX = 9
"""Of its watcher: one that the server does not come to."""


async def serve(namespace: str, private_dir: Path) -> None:
    paths, watcher, tasks = StatePaths.of(namespace, os.environ), Watcher(namespace, SERVICE, _INDEX), TaskGuard()
    graph = ResolvedGraph.from_json(paths.graph_file.read_bytes())
    service = graph.service(SERVICE)
    bus = await Bus.connect(BusAddress.load(paths.bus_file), name=str(watcher))
    lease = secrets.token_hex(8)
    presence = Presence(str(watcher), SERVICE, service.role, lease, os.getpid(), "starting", machine=machine_id())
    announcer = Announcer(bus, Subjects(namespace, FIRST_OF_MAIN), presence)
    worker = VllmWorker(
        ServiceContext(watcher, FIRST_OF_MAIN, lease, graph, service, bus, announcer, private_dir, tasks)
    )
    tasks.spawn("presence", announcer.run())
    await worker.start()
    announcer.update(state="ready")
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await worker.stop()
    await tasks.close()
    await bus.close()


if __name__ == "__main__":
    os.environ[CPU_CORES_VARIABLE] = sys.argv[2]
    with tempfile.TemporaryDirectory(prefix="far-") as directory:
        asyncio.run(serve(sys.argv[1], Path(directory)))
