"""A server whose bus is a cluster: it outlives each of the cluster's servers, and its clients notice nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import OWNERS_BUCKET, Subjects
from tests.integration.nats_cluster import SERVERS, ClusterServer, NatsCluster, running_cluster
from tests.integration.supervisor.answered_streams import GRAPH, MOCKERS, streams, until_answered
from tests.integration.supervisor.scaled_server import NAMESPACE, ScaledServer

pytestmark = pytest.mark.integration

SUBJECTS = Subjects(NAMESPACE, FIRST_OF_MAIN)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    (tmp_path / "nats").mkdir()
    with running_cluster(tmp_path / "nats") as cluster:
        asyncio.run(cluster.ready())
        yield cluster


def server_of(cluster: NatsCluster, pid: int) -> ClusterServer:
    """The one that a process is connected to."""
    ports = {connection.raddr.port for connection in psutil.Process(pid).net_connections() if connection.raddr}
    return next(server for server in cluster.servers if server.port in ports)


async def replicas(cluster: NatsCluster) -> set[int | None]:
    """Of the streams that a server has on the bus."""
    bus = await Bus.connect(cluster.address, name="test")
    names = (SUBJECTS.prefill_stream, f"KV_{SUBJECTS.settings_bucket}", f"KV_{OWNERS_BUCKET}")
    # An election of leaders may take long on a busy machine.
    context = bus.jetstream(timeout_s=60)
    found = {(await context.stream_info(name)).config.num_replicas for name in names}
    await bus.close()
    return found


async def test_streams_outlive_the_servers_of_worker_and_queue(cluster: NatsCluster, tmp_path: Path) -> None:
    options = (*MOCKERS, f"--nats-url={cluster.url}")
    with await asyncio.to_thread(ScaledServer, tmp_path / "state", GRAPH, *options) as server:
        assert await replicas(cluster) == {SERVERS}
        pids = {name: server.pid(name) for name in ("Front", "VllmWorker", "PrefillWorker")}
        async with streams(server, 8) as frontend:
            await until_answered(frontend, 8)
            of_worker = server_of(cluster, pids["VllmWorker"])
            of_worker.kill()
            await until_answered(frontend, 16)
            of_worker.start()
            await cluster.ready()
            leader = await cluster.leader_of(SUBJECTS.prefill_stream)
            assert leader is not None
            leader.kill()
            await until_answered(frontend, 16)
        assert {name: server.pid(name) for name in pids} == pids
        code, out, err = await asyncio.to_thread(server.command, "ps")
        assert (code, out.count("ready")) == (0, len(pids)), out + err
