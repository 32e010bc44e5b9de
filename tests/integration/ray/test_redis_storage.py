"""A Ray cluster whose head keeps its tables in Redis: what a graph has there outlives the head."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.supervisor.places.port import Need
from tests.integration.ray.raylets import Raylets, raylets, until

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
]

ONE = Need("decode", 1)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """Address of a Redis server, which keeps nothing on disk."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(tmp_path), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: _listens(port))
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def cluster_in_redis(redis: str, tmp_path: Path) -> Iterator[Raylets]:
    with raylets(1, tmp_path, {"RAY_REDIS_ADDRESS": redis}) as made:
        yield made


async def test_what_a_graph_has_in_the_cluster_outlives_its_head(cluster_in_redis: Raylets) -> None:
    from dynamo_local.ray.cluster import RayCluster

    cluster = await RayCluster.connect("redis", cluster_in_redis.address)
    try:
        slot = await cluster.reserve("redis/first", ONE)
        assert await cluster.add_note("owner/1", b"me")
        cluster_in_redis.kill_head()
        cluster_in_redis.start_head()
        assert await cluster.reservations() == {"redis/first": slot}
        assert await cluster.notes() == {"owner/1": b"me"}
        assert (await cluster.reserve("redis/second", ONE)).node == slot.node
        for name in ("redis/first", "redis/second"):
            await cluster.release(name)
        assert await cluster.reservations() == {}
    finally:
        await cluster.close()


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
