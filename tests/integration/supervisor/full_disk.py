"""A server's streams on its own NATS, whose disk becomes full and has room again. Run in a private file system."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from dynamo_local.bus.jetstream.owner_record import BusRecord
from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.work import PrefillJob, QueueLength
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.process.ownership import Owner
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.server.nats import streams as module
from dynamo_local.supervisor.server.nats.streams import ServerStreams
from dynamo_local.supervisor.server.ownership import Ownership
from tests.chaos.surroundings.private import disk
from tests.integration.nats_process import NatsProcess
from tests.unit.supervisor.recording import RecordingReport

JOB = PrefillJob("job", "request", "frontend", 100, 0.0)


async def main() -> None:
    folder = disk()
    assert folder is not None
    # Nobody takes the jobs.
    module._DRAINED_LOOKS = 0
    nats = NatsProcess(folder / "nats")
    nats.start()
    bus, subjects, report = (
        await Bus.connect(nats.address, name="test"),
        Subjects("full", FIRST_OF_MAIN),
        RecordingReport(),
    )
    ownership = Ownership("full", Owner("one", "here", "host"), report)
    service = ResolvedService("Prefill", "m:S", "prefill", 1, 0, 0, {}, {}, ())
    streams = ServerStreams(ResolvedGraph("m:S", "full", (service,)), report, ownership, own_nats=True)
    try:
        await streams.create(bus)
        queue, filler = PrefillQueue(bus, subjects), folder / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(1 << 20))
        with suppress(BusError):
            # The last page of a file has room still.
            for _ in range(50):
                await ownership.confirm(BusRecord(bus, "full", in_memory=True))
        with suppress(BusError):
            while True:
                await queue.publish(JOB)
        filler.unlink()
        await streams.renew()
        assert report.lines == []
        assert await queue.length() == QueueLength(0, 0)
        await queue.publish(JOB)
    finally:
        await bus.close()
        nats.end()


if __name__ == "__main__":
    asyncio.run(main())
