"""The queue and the settings that a server creates on the bus for its processes, and deletes again."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.jetstream.live_settings import create_settings, read_settings, write_setting
from dynamo_local.bus.jetstream.owner_record import BusRecord
from dynamo_local.bus.jetstream.prefill_queue import PrefillConsumer, PrefillQueue, create_prefill_queue
from dynamo_local.bus.jetstream.streams import StreamAbsentError
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import NamespaceBusyError, QueueAbsentError, SupervisorError
from dynamo_local.core.messages.work import PrefillJob, QueueLength
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.process.ownership import Owner
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.server.nats.nats_server import find_binary
from dynamo_local.supervisor.server.nats.streams import ServerStreams
from dynamo_local.supervisor.server.ownership import Ownership
from tests.chaos.surroundings.private import enter, why_not
from tests.integration.nats_process import NatsProcess
from tests.integration.server_process import PATIENCE_S, ServerProcess
from tests.unit.supervisor.recording import RecordingReport

pytestmark = pytest.mark.integration

LEASE_S = 1.0
JOB = PrefillJob("job", "request", "frontend", 100, 0.0)


def graph(subjects: Subjects, *roles: str) -> ResolvedGraph:
    services = tuple(
        ResolvedService(f"Service{number}", "m:S", role, 1, 0, 0, {}, {}, ()) for number, role in enumerate(roles)
    )
    return ResolvedGraph("m:S", subjects.namespace, services)


def ownership_of(subjects: Subjects, report: RecordingReport, home: str) -> Ownership:
    """Of a server whose files are at `home`."""
    owner = Owner(secrets.token_hex(4), home, f"host-of-{home}", LEASE_S)
    return Ownership(subjects.namespace, owner, report, renew_every_s=LEASE_S / 4)


def record_of(bus: Bus, subjects: Subjects) -> BusRecord:
    return BusRecord(bus, subjects.namespace)


def streams_of(graph: ResolvedGraph, report: RecordingReport, home: str = "here") -> ServerStreams:
    return ServerStreams(graph, report, ownership_of(Subjects(graph.namespace), report, home))


async def test_a_graph_with_a_prefill_service_gets_a_queue_and_settings(
    bus: Bus, nats_address: BusAddress, subjects: Subjects
) -> None:
    report = RecordingReport()
    streams = streams_of(graph(subjects, "decode", "prefill", "frontend"), report)
    await streams.create(bus)
    assert await PrefillQueue(bus, subjects).length() == QueueLength(0, 0)
    assert await read_settings(bus, subjects) == {}
    await streams.delete(nats_address)
    with pytest.raises(QueueAbsentError):
        await PrefillQueue(bus, subjects).length()
    with pytest.raises(StreamAbsentError):
        await read_settings(bus, subjects)
    assert report.lines == []


async def test_a_graph_without_one_gets_settings_only(bus: Bus, subjects: Subjects) -> None:
    await streams_of(graph(subjects, "aggregated", "frontend"), RecordingReport()).create(bus)
    with pytest.raises(QueueAbsentError):
        await PrefillQueue(bus, subjects).length()
    assert await read_settings(bus, subjects) == {}


async def test_what_an_earlier_server_has_left_is_gone(bus: Bus, subjects: Subjects) -> None:
    await create_prefill_queue(bus, subjects)
    await create_settings(bus, subjects)
    await PrefillQueue(bus, subjects).publish(JOB)
    await write_setting(bus, subjects, "max-prefill-queue-size", 9)
    await streams_of(graph(subjects, "prefill"), RecordingReport()).create(bus)
    assert await PrefillQueue(bus, subjects).length() == QueueLength(0, 0)
    assert await read_settings(bus, subjects) == {}


async def test_a_queue_that_is_made_anew_waits_for_the_jobs_in_it(bus: Bus, subjects: Subjects) -> None:
    report = RecordingReport()
    streams = streams_of(graph(subjects, "prefill"), report)
    await streams.create(bus)
    await write_setting(bus, subjects, "max-prefill-queue-size", 9)
    queue, consumer = PrefillQueue(bus, subjects), PrefillConsumer(bus, subjects)
    await queue.publish(JOB)
    renewal = asyncio.create_task(streams.renew())
    (taken,) = await consumer.take(1, PATIENCE_S)
    assert taken.job == JOB
    await renewal
    assert await queue.length() == QueueLength(0, 0)
    await queue.publish(JOB)
    assert [taken.job for taken in await consumer.take(1, PATIENCE_S)] == [JOB]
    assert await read_settings(bus, subjects) == {"max-prefill-queue-size": 9}
    assert report.lines == []
    await consumer.close()


async def test_each_revision_of_an_endpoint_has_a_queue_of_its_own(
    bus: Bus, nats_address: BusAddress, subjects: Subjects
) -> None:
    streams = streams_of(graph(subjects, "frontend"), RecordingReport())
    await streams.create(bus)
    queues = {name: PrefillQueue(bus, Subjects(subjects.namespace, name)) for name in ("chat@1", "chat@2", "embed@1")}
    for name in ("chat@1", "chat@2"):
        await streams.create_streams(bus, graph(subjects, "decode", "prefill"), name)
    await streams.create_streams(bus, graph(subjects, "aggregated"), "embed@1")
    await queues["chat@1"].publish(JOB)
    assert [(await queues[name].length()).waiting for name in ("chat@1", "chat@2")] == [1, 0]
    with pytest.raises(QueueAbsentError):
        await queues["embed@1"].length()
    for name in ("chat@1", "embed@1"):
        await streams.delete_streams(bus, name)
    with pytest.raises(QueueAbsentError):
        await queues["chat@1"].length()
    await streams.renew()
    assert await queues["chat@2"].length() == QueueLength(0, 0)
    await streams.delete(nats_address)
    with pytest.raises(QueueAbsentError):
        await queues["chat@2"].length()


async def test_only_what_was_created_is_deleted(bus: Bus, nats_address: BusAddress, subjects: Subjects) -> None:
    await create_prefill_queue(bus, subjects)
    streams = streams_of(graph(subjects, "aggregated"), RecordingReport())
    await streams.delete(nats_address)
    await streams.create(bus)
    await streams.delete(nats_address)
    assert await PrefillQueue(bus, subjects).length() == QueueLength(0, 0)


async def test_a_stream_of_somebody_else_stops_only_who_needs_it(bus: Bus, subjects: Subjects) -> None:
    theirs = bus.jetstream(timeout_s=5)
    for number, name in enumerate((subjects.prefill_stream, f"KV_{subjects.settings_bucket}")):
        await theirs.add_stream(name=name, subjects=[f"{subjects.namespace}.theirs.{number}"])
    report = RecordingReport()
    await streams_of(graph(subjects, "aggregated"), report).create(bus)
    assert "cannot be changed" in report.lines[0]
    with pytest.raises(SupervisorError, match=r"no prefill queue.*has not made"):
        await streams_of(graph(subjects, "prefill"), report).create(bus)


async def test_a_second_server_deletes_nothing_of_the_first(
    bus: Bus, nats_address: BusAddress, subjects: Subjects
) -> None:
    report = RecordingReport()
    first, second = (
        ownership_of(subjects, report, home="here"),
        ownership_of(subjects, report, home="there"),
    )
    streams = ServerStreams(graph(subjects, "prefill"), report, first)
    others = ServerStreams(graph(subjects, "prefill"), report, second)
    await streams.create(bus)
    await PrefillQueue(bus, subjects).publish(JOB)
    keeping = asyncio.create_task(first.keep(record_of(bus, subjects)))
    with pytest.raises(NamespaceBusyError, match="belongs to a server on host-of-here; stop that one there"):
        await others.create(bus)
    await others.delete(nats_address)
    assert (await PrefillQueue(bus, subjects).length()).waiting == 1
    keeping.cancel()
    # The first one is silent from now on.
    await others.create(bus)
    assert (await PrefillQueue(bus, subjects).length()).waiting == 0
    await streams.renew()
    assert "belongs to a server on host-of-there" in report.lines[-1]
    await PrefillQueue(bus, subjects).publish(JOB)
    await streams.delete(nats_address)
    assert "belongs to a server on host-of-there" in report.lines[-1]
    assert (await PrefillQueue(bus, subjects).length()).waiting == 1
    with pytest.raises(NamespaceBusyError):
        await first.keep(record_of(bus, subjects))
    await others.delete(nats_address)
    await streams_of(graph(subjects, "prefill"), report, "third").create(bus)


@pytest.mark.skipif(why_not() is not None, reason="no private file systems here")
def test_a_queue_is_made_anew_when_a_full_disk_has_room_again(tmp_path: Path) -> None:
    assert enter(tmp_path / "disk", "tests.integration.supervisor.full_disk", ()) == 0


@pytest.fixture
def plain_nats() -> Iterator[BusAddress]:
    """A NATS server without JetStream."""
    command = [str(find_binary()), "--addr=127.0.0.1", "--port=-1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log = itertools.takewhile(lambda line: "Server is ready" not in line, process.stderr)
    (where,) = (line.split()[-1] for line in log if "Listening for client connections" in line)
    yield BusAddress(f"nats://{where}")
    process.terminate()
    process.communicate(timeout=PATIENCE_S)


async def test_without_jetstream_there_is_a_server_but_no_queue(plain_nats: BusAddress, subjects: Subjects) -> None:
    bus, report = await Bus.connect(plain_nats, name="test"), RecordingReport()
    streams = streams_of(graph(subjects, "aggregated"), report)
    await streams.create(bus)
    assert "does not do JetStream" in report.lines[0]
    with pytest.raises(SupervisorError, match="does not do JetStream"):
        await streams_of(graph(subjects, "prefill"), report).create(bus)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(LEASE_S):
            await ownership_of(subjects, report, home="here").keep(record_of(bus, subjects))
    await bus.close()
    await streams.delete(plain_nats)
    assert len(report.lines) == 1


async def test_a_bus_that_is_gone_at_the_end_is_only_reported(own_nats: NatsProcess, subjects: Subjects) -> None:
    bus, report = await Bus.connect(own_nats.address, name="test"), RecordingReport()
    streams = streams_of(graph(subjects, "prefill"), report)
    await streams.create(bus)
    await bus.close()
    own_nats.kill()
    await streams.delete(own_nats.address)
    assert len(report.lines) == 1
    assert "are left on the bus" in report.lines[0]


def length_of(address: BusAddress, namespace: str) -> QueueLength:
    async def ask() -> QueueLength:
        bus = await Bus.connect(address, name="test")
        try:
            return await PrefillQueue(bus, Subjects(namespace, FIRST_OF_MAIN)).length()
        finally:
            await bus.close()

    return asyncio.run(ask())


class Prefilling(ServerProcess):
    def __init__(self, root: Path, namespace: str, *url: str) -> None:
        super().__init__(root, namespace, ["-m", "tests.integration.disaggregation.serve_prefill", namespace, *url])


def test_a_server_has_a_queue_before_it_is_ready_and_leaves_none(
    tmp_path: Path, nats_address: BusAddress, subjects: Subjects
) -> None:
    namespace = subjects.namespace
    url = nats_address.url.replace("nats://", f"nats://{nats_address.user}:{nats_address.token}@")
    with Prefilling(tmp_path / "state", namespace, url) as server:
        server.line("Prefill  ready")
        assert length_of(nats_address, namespace) == QueueLength(0, 0)
        server.line("all services ready")
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        server.assert_nothing_left()
    with pytest.raises(QueueAbsentError):
        length_of(nats_address, namespace)


def test_a_server_with_nats_of_its_own_has_a_queue(tmp_path: Path) -> None:
    with Prefilling(tmp_path / "state", "own") as server:
        server.line("all services ready")
        assert length_of(BusAddress.load(server.paths.bus_file), "own") == QueueLength(0, 0)
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        server.assert_nothing_left()
