"""The owner of a namespace on a bus: claims, renewals, takeovers, early ends."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import NamespaceBusyError, SupervisorError
from dynamo_local.core.process.ownership import Owner
from dynamo_local.core.subjects import OWNERS_BUCKET, Subjects
from dynamo_local.supervisor.server.ownership import Ownership
from dynamo_local.supervisor.server.serve import owned
from dynamo_local.supervisor.server.settings import StopRequest
from tests.integration.nats_process import NatsProcess
from tests.integration.server_process import PATIENCE_S
from tests.integration.supervisor.test_streams import ownership_of, record_of
from tests.unit.supervisor.recording import RecordingReport

pytestmark = pytest.mark.integration


async def test_an_owner_goes_on_with_a_bus_that_begins_afresh(own_nats: NatsProcess, subjects: Subjects) -> None:
    bus, report = await Bus.connect(own_nats.address, name="test"), RecordingReport()
    ownership = ownership_of(subjects, report, home="here")
    await ownership.confirm(record_of(bus, subjects))
    assert await bus.jetstream(timeout_s=5).delete_stream(f"KV_{OWNERS_BUCKET}")
    await ownership.confirm(record_of(bus, subjects))
    another = ownership_of(subjects, report, home="there")
    with pytest.raises(NamespaceBusyError):
        await asyncio.gather(ownership.keep(record_of(bus, subjects)), another.confirm(record_of(bus, subjects)))
    await bus.close()


async def test_a_record_that_somebody_has_deleted_is_claimed_and_renewed(bus: Bus, subjects: Subjects) -> None:
    first, second = (ownership_of(subjects, RecordingReport(), home=home) for home in ("here", "there"))
    await first.confirm(record_of(bus, subjects))
    records = await bus.jetstream(timeout_s=5).key_value(OWNERS_BUCKET)
    await records.delete(subjects.namespace)
    async with asyncio.timeout(PATIENCE_S):
        await first.confirm(record_of(bus, subjects))
        await records.delete(subjects.namespace)
        await second.confirm(record_of(bus, subjects))
    with pytest.raises(NamespaceBusyError):
        await first.confirm(record_of(bus, subjects))


async def test_who_could_not_claim_a_namespace_looks_again_and_ends_if_it_is_anothers(
    bus: Bus, subjects: Subjects
) -> None:
    first, second = (ownership_of(subjects, RecordingReport(), home=home) for home in ("here", "there"))
    await first.confirm(record_of(bus, subjects))
    keeping = asyncio.create_task(first.keep(record_of(bus, subjects)))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(NamespaceBusyError):
            await second.keep(record_of(bus, subjects))
    keeping.cancel()


async def test_an_early_end_gives_the_namespace_back(bus: Bus, nats_address: BusAddress, subjects: Subjects) -> None:
    report = RecordingReport()
    mine = ownership_of(subjects, report, home="here")
    with pytest.raises(SupervisorError):
        async with owned(nats_address, subjects.namespace, mine, StopRequest()):
            raise SupervisorError("no files")
    await ownership_of(subjects, report, home="there").confirm(record_of(bus, subjects))
    assert report.lines == []


async def test_a_stop_ends_the_wait_for_a_silent_owner(bus: Bus, nats_address: BusAddress, subjects: Subjects) -> None:
    report, stop = RecordingReport(), StopRequest()
    await Ownership(subjects.namespace, Owner("one", "here", "host", 3600.0), report).confirm(record_of(bus, subjects))

    async def end() -> None:
        while not report.lines:  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.01)
        stop.wanted.set()

    ending, mine = asyncio.create_task(end()), ownership_of(subjects, report, home="there")
    async with asyncio.timeout(PATIENCE_S), owned(nats_address, subjects.namespace, mine, stop):
        owner = (await record_of(bus, subjects).read()).owner
        assert owner is not None
        assert owner.home == "here"
    await ending
