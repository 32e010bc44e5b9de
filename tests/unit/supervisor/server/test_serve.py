from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.process.ownership import Owner
from dynamo_local.supervisor.server import serve
from dynamo_local.supervisor.server.ownership import ClusterRecord, Ownership
from dynamo_local.supervisor.server.serve import owned
from dynamo_local.supervisor.server.settings import StopRequest, handled_signals
from tests.memory_cluster import MemoryCluster
from tests.unit.supervisor.recording import RecordingReport


@pytest.fixture(autouse=True)
def hangup_as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_ends_the_server_unless_it_was_started_to_survive_one() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert signal.SIGHUP in handled_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert handled_signals() == (signal.SIGINT, signal.SIGTERM)


class ClosedBus:
    async def close(self) -> None:
        pass


async def test_the_namespace_is_kept_from_before_the_first_step_until_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect(*_: object, **__: object) -> ClosedBus:
        return ClosedBus()

    record = ClusterRecord(MemoryCluster({}))

    def record_of(*_: Any) -> ClusterRecord:
        return record

    monkeypatch.setattr(Bus, "connect", connect)
    monkeypatch.setattr(serve, "BusRecord", record_of)
    mine = Owner("mine", "here", "my-host")
    ownership = Ownership("dynamo", mine, RecordingReport(), renew_every_s=0.001)
    async with owned(BusAddress("nats://h:1"), "dynamo", ownership, StopRequest()):
        first = await record.read()
        async with asyncio.timeout(60):
            # The server may take long to start and to end.
            while (await record.read()).revision < first.revision + 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert (await record.read()).owner == first.owner == mine
    assert (await record.read()).owner is None
