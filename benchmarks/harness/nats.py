"""A NATS server as `dynamo serve` starts it, without the rest of a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.harness.accounting import Process, descendants
from benchmarks.harness.servers import ServerError
from dynamo_local.bus.address import BusAddress
from dynamo_local.supervisor.server.nats.nats_server import NatsServer

_START_WITHIN_S = 20.0


@contextlib.asynccontextmanager
async def nats_server(directory: Path) -> AsyncIterator[tuple[BusAddress, tuple[Process, ...]]]:
    """An empty server, which ends with the block: its address, and its processes."""
    server = NatsServer.at(directory)
    server.write_files()
    popen = _start(server)
    try:
        address = await _listening(server, popen)
        yield address, descendants(popen.pid)
    finally:
        popen.terminate()
        await asyncio.to_thread(popen.wait)


def _start(server: NatsServer) -> subprocess.Popen[bytes]:
    with (server.directory / "nats.log").open("wb") as log:
        # Of a benchmark that is killed, no server stays behind.
        environ = {**os.environ, "DYN_PARENT_PID": str(os.getpid())}
        return subprocess.Popen(server.argv, env=environ, stdout=log, stderr=log)


async def _listening(server: NatsServer, popen: subprocess.Popen[bytes]) -> BusAddress:
    deadline = time.monotonic() + _START_WITHIN_S
    while time.monotonic() < deadline and popen.poll() is None:
        if chosen := server.with_chosen_port(popen.pid):
            return chosen.address
        await asyncio.sleep(0.02)
    raise ServerError("NATS did not start")
