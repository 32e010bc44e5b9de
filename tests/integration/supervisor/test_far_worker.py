"""A worker at the far end of a long way, by TLS: it serves like the others, and is done without while it is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from dynamo_local.supervisor.server.nats.nats_server import write_bus_address
from tests.chaos.frontend import ChaosFrontend
from tests.integration.relay import Relay
from tests.integration.server_process import PATIENCE_S
from tests.integration.supervisor.answered_streams import GRAPH, MOCKERS, address, streams, until_answered
from tests.integration.supervisor.scaled_server import ScaledServer

pytestmark = pytest.mark.integration

HOST = "127.0.0.1"
SERVER_HOST = "127.0.0.2"
DELAY_S = 0.05
FAR = "VllmWorker_1"
CUTS = 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScaledServer]:
    with ScaledServer(tmp_path / "state", GRAPH, *MOCKERS, f"--bus-host={SERVER_HOST}") as server:
        yield server


@pytest.fixture
async def relay(server: ScaledServer) -> AsyncIterator[Relay]:
    """The way to a second worker, which knows no other to the bus."""
    near = address(server)
    port = urlsplit(near.url).port
    assert port is not None
    relay = Relay(SERVER_HOST, port, DELAY_S)
    far = msgspec.structs.replace(near, url=f"tls://{SERVER_HOST}:{await relay.start()}")
    write_bus_address(server.paths.bus_file, far)
    code, _, err = await asyncio.to_thread(server.command, "scale", "VllmWorker=2")
    assert code == 0, err
    write_bus_address(server.paths.bus_file, near)
    yield relay
    await relay.close()


def works(frontend: ChaosFrontend, watcher: str) -> bool:
    """Whether a worker has requests, or could be given some."""
    members = {member.lease for member in frontend.fleet.view.routable() if member.watcher.endswith(watcher)}
    return any(live.log.worker in members for live in frontend.dispatcher.table.requests.values())


async def until(frontend: ChaosFrontend, *, far_works: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while works(frontend, FAR) is not far_works:  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.02)


async def test_a_far_worker_serves_is_cut_off_and_comes_back(server: ScaledServer, relay: Relay) -> None:
    pids = {name: server.pid(name) for name in ("VllmWorker", FAR)}
    assert relay.taken
    async with streams(server, 8) as frontend:
        await until(frontend, far_works=True)
        await until_answered(frontend, 16)
        relay.part()
        await until(frontend, far_works=False)
        await until_answered(frontend, 16)
        assert not works(frontend, FAR)
        relay.heal()
        await until(frontend, far_works=True)
        await until_answered(frontend, 16)
        for _ in range(CUTS):
            relay.cut()
            await until_answered(frontend, 8)
        await until(frontend, far_works=True)
    assert {name: server.pid(name) for name in pids} == pids
    assert relay.taken > CUTS
