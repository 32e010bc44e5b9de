"""A real NATS cluster for tests: three servers with JetStream, that can be killed and started again one by one."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.jetstream.streams import JetStream
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.supervisor.server.nats.nats_server import find_binary

SERVERS = 3
_HOST = "127.0.0.1"
_DEADLINE_S = 60.0


@dataclass
class ClusterServer:
    """A server of the cluster. `name`: by which NATS tells who leads a stream."""

    name: str
    port: int
    config: Path
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.config.with_suffix(".log").open("ab") as log:
            command = [str(find_binary()), "--config", str(self.config)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        """Like a crash. Harmless if it has ended already."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_DEADLINE_S)


class NatsCluster:
    """Servers that know each other by their routes."""

    def __init__(self, directory: Path) -> None:
        self.token = secrets.token_hex(8)
        ports = _free_ports(2 * SERVERS)
        routes = [f"nats://{_HOST}:{port}" for port in ports[SERVERS:]]
        self.servers = [
            self._server(directory, f"s{number}", ports[number], ports[SERVERS + number], routes)
            for number in range(SERVERS)
        ]

    @property
    def url(self) -> str:
        """For --nats-url."""
        return ",".join(f"nats://{self.token}@{_HOST}:{server.port}" for server in self.servers)

    @property
    def address(self) -> BusAddress:
        return BusAddress(",".join(f"nats://{_HOST}:{server.port}" for server in self.servers), self.token)

    async def leader_of(self, stream: str) -> ClusterServer | None:
        """The server that leads a stream; None while there is no leader. Raises BusError."""
        bus = await Bus.connect(self.address, name="test")
        try:
            info = await bus.jetstream(timeout_s=5).stream_info(stream)
            assert info.cluster is not None
            return next((server for server in self.servers if server.name == info.cluster.leader), None)
        finally:
            await bus.close()

    async def ready(self) -> None:
        """Wait until all servers do JetStream together."""
        async with asyncio.timeout(_DEADLINE_S):
            for server in self.servers:
                while not await self._stores(server):  # noqa: ASYNC110  # what is waited for has no event
                    await asyncio.sleep(0.1)

    async def _stores(self, server: ClusterServer) -> bool:
        try:
            bus = await Bus.connect(
                BusAddress(f"nats://{_HOST}:{server.port}", self.token), name="test", deadline_s=1.0
            )
        except BusError:
            return False
        try:
            stream = JetStream(bus, timeout_s=2.0)
            await stream.create_bucket("ready", "ready.changes.>")
            return await stream.delete_bucket("ready")
        except BusError:
            return False
        finally:
            await bus.close()

    def _server(self, directory: Path, name: str, port: int, route: int, routes: list[str]) -> ClusterServer:
        config = directory / f"{name}.conf"
        config.write_text(
            json.dumps(
                {
                    "server_name": name,
                    "host": _HOST,
                    "port": port,
                    "authorization": {"token": self.token},
                    "cluster": {"name": "test", "host": _HOST, "port": route, "routes": routes},
                    "jetstream": {"store_dir": str(directory / name)},
                }
            )
        )
        return ClusterServer(name, port, config)


@contextmanager
def running_cluster(directory: Path) -> Iterator[NatsCluster]:
    """A cluster for as long as the context lasts. Wait for `ready` before it is used."""
    cluster = NatsCluster(directory)
    with ExitStack() as stack:
        for server in cluster.servers:
            stack.callback(server.kill)
            server.start()
        yield cluster


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]
