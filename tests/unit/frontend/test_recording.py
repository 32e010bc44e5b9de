"""Results on their way to the disk: whoever records one knows when it is there, and they stay in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from components.frontend.batches.run import Recorder
from dynamo_local.core.stored.lines import answered_line, recorded_in
from state.files import Disk
from state.stored.results import Results


class SlowDisk(Disk):
    """A disk whose `sync` takes until `may_go_on` is set."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.syncs = 0

    def sync(self, descriptor: int) -> None:
        self.syncs += 1
        assert self.may_go_on.wait(60)
        super().sync(descriptor)


@asynccontextmanager
async def recording(results: Results) -> AsyncIterator[Recorder]:
    recorder = Recorder(results, "batch", lambda: None)
    task = asyncio.create_task(recorder.run())
    try:
        yield recorder
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_what_is_being_written_settles_though_nobody_waits_for_it(tmp_path: Path) -> None:
    disk = SlowDisk()
    results = Results(tmp_path, disk)
    results.open()
    async with recording(results) as recorder, asyncio.timeout(60):

        def record(name: str) -> asyncio.Task[None]:
            return asyncio.create_task(recorder.record(name, answered_line("r", name, 200, b"{}"), answered=True))

        first = record("first")
        while not disk.syncs:  # noqa: ASYNC110  # a thread
            await asyncio.sleep(0.001)
        others = [record(f"other {n}") for n in range(5)]
        await asyncio.sleep(0)
        for task in (first, *others):
            task.cancel()
        settled = asyncio.create_task(recorder.settled())
        await asyncio.sleep(0)
        assert not settled.done()
        disk.may_go_on.set()
        await settled
    lines = results.output.read_bytes().splitlines(keepends=True)
    assert [found.custom_id for line in lines if (found := recorded_in(line))] == [
        "first",
        *(f"other {n}" for n in range(5)),
    ]
    assert len(results.done) == 6
    # Those that came meanwhile were written together.
    assert disk.syncs == 2
    results.close()
