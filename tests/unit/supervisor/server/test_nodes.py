"""A head and its cluster: what it does to the nodes there, and what it leaves alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, cast

import pytest

from dynamo_local.core.errors import NamespaceBusyError
from dynamo_local.core.process.ownership import Owner
from dynamo_local.supervisor.server import nodes as module
from dynamo_local.supervisor.server.machinery import Machinery
from dynamo_local.supervisor.server.nodes import ServerNodes
from dynamo_local.supervisor.server.ownership import ClusterRecord, Ownership
from dynamo_local.tasks import TaskGuard
from tests.memory_cluster import MemoryCluster
from tests.unit.supervisor.recording import RecordingReport

NAMESPACE = "far"
ANOTHER = Owner("another", "there", "another-host")


class Connected(MemoryCluster):
    """The cluster that a test has made, by name. `ending`: what its end of a node server waits for."""

    made: ClassVar[Connected]
    ending = asyncio.Event()

    @classmethod
    async def connect(cls, namespace: str, address: str | None) -> Connected:
        return cls.made

    async def end_node(self, node: str) -> None:
        await self.ending.wait()
        await super().end_node(node)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Connected:
    """Something of the namespace runs there."""
    cluster = Connected({"a": 2})
    cluster.ending = asyncio.Event()
    cluster.ending.set()
    cluster.running.add("a")
    cluster.reserved[f"{NAMESPACE}/w"] = ("a", 1.0)
    monkeypatch.setattr(Connected, "made", cluster, raising=False)
    return cluster


@pytest.fixture
def report() -> RecordingReport:
    return RecordingReport()


@pytest.fixture
def nodes(tmp_path: Path, report: RecordingReport) -> ServerNodes:
    launch = SimpleNamespace(
        environment=f"{__name__}:Connected",
        inventory=SimpleNamespace(kind="cpu-slot"),
        graph=SimpleNamespace(namespace=NAMESPACE),
        cluster_address=None,
        paths=SimpleNamespace(root=tmp_path),
    )
    return ServerNodes(cast(Machinery, SimpleNamespace(launch=launch, report=report, tasks=TaskGuard())))


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def test_what_a_crash_has_left_is_cleared(cluster: Connected, nodes: ServerNodes, stack: AsyncExitStack) -> None:
    await nodes.connect(stack, asyncio.Event())
    assert (cluster.running, cluster.reserved) == (set(), {})


async def test_a_second_head_is_refused_and_touches_nothing(
    cluster: Connected, nodes: ServerNodes, stack: AsyncExitStack, report: RecordingReport
) -> None:
    first, record = Ownership(NAMESPACE, ANOTHER, report, renew_every_s=0.02), ClusterRecord(cluster)
    await first.confirm(record)
    keeping = asyncio.create_task(first.keep(record))
    with pytest.raises(NamespaceBusyError, match="in this cluster belongs to a server on another-host"):
        await nodes.connect(stack, asyncio.Event())
    await stack.aclose()
    keeping.cancel()
    assert (cluster.running, list(cluster.reserved)) == ({"a"}, [f"{NAMESPACE}/w"])


async def test_a_head_that_was_replaced_ends_nothing_of_the_other(
    cluster: Connected, nodes: ServerNodes, stack: AsyncExitStack, report: RecordingReport
) -> None:
    await nodes.connect(stack, asyncio.Event())
    record = ClusterRecord(cluster)
    await record.replace((await record.read()).revision, ANOTHER)
    cluster.running.add("a")
    cluster.reserved[f"{NAMESPACE}/w"] = ("a", 1.0)
    await stack.aclose()
    assert (cluster.running, list(cluster.reserved)) == ({"a"}, [f"{NAMESPACE}/w"])
    assert "belongs to a server on another-host" in report.lines[-1]
    assert (await record.read()).owner == ANOTHER


async def test_a_head_that_has_ended_lets_another_one_have_the_cluster(
    cluster: Connected, nodes: ServerNodes, stack: AsyncExitStack
) -> None:
    await nodes.connect(stack, asyncio.Event())
    await stack.aclose()
    assert (await ClusterRecord(cluster).read()).owner is None


async def test_nodes_are_not_waited_for_once_it_is_hurried(
    cluster: Connected,
    nodes: ServerNodes,
    stack: AsyncExitStack,
    report: RecordingReport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_HURRIED_S", 0.0)
    hurry = asyncio.Event()
    await nodes.connect(stack, hurry)
    cluster.reserved[f"{NAMESPACE}/w"] = ("a", 1.0)
    cluster.ending.clear()
    ending = asyncio.create_task(nodes.end(hurry))
    hurry.set()
    async with asyncio.timeout(60):
        await ending
        # It is not tried again.
        await stack.aclose()
    assert "not waited for" in report.lines[-1]
