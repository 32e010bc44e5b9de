"""A graph on two nodes in memory, for each test that wants it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dynamo_local.tasks import TaskGuard
from tests.unit.supervisor.places.cluster_site import ClusterInMemory


@pytest.fixture
async def site() -> AsyncIterator[ClusterInMemory]:
    tasks = TaskGuard()
    try:
        yield ClusterInMemory(tasks)
    finally:
        await tasks.close()
