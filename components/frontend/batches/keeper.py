"""Takes the batches of a server to run them. Of several frontends, one has a batch at a time; another one takes it when
that one has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from components.frontend.batches.run import BatchRun, Surroundings
from dynamo_local.core.errors import StateError
from dynamo_local.log_once import LogOnce
from dynamo_local.tasks import finish_in_thread
from state.stored.batches import BatchFolder, BatchStore

_log = logging.getLogger(__name__)

AT_ONCE = 4
"""Batches that a frontend runs at the same time, the oldest first, beside those whose models have no worker."""

MOST = 32
"""Batches that a frontend has at the same time, those included."""

LOOK_EVERY_S = 1.0
_SWEEP_EVERY_S = 60.0
_AGAIN_S = 5.0


class BatchKeeper:
    """Runs the batches of one server, as far as this frontend has them."""

    def __init__(self, store: BatchStore, around: Surroundings) -> None:
        self._store = store
        self._around = around
        self._running: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, BatchRun] = {}
        self._log_once = LogOnce(_log)
        self._stopping = False
        self._sweep_at = 0.0

    async def run(self) -> None:
        """Look for batches again and again, until cancelled."""
        pacing = asyncio.create_task(self._around.pacer.run(), name="pace of batches")
        try:
            while not self._stopping:
                try:
                    await self._take_new()
                    await self._sweep()
                    self._log_once.clear()
                except StateError as error:
                    self._log_once.warn(f"batches wait: {error}")
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            pacing.cancel()
            await self.stop()

    async def stop(self) -> None:
        """Leave all batches to others, at once: what is recorded stays."""
        self._stopping = True
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _take_new(self) -> None:
        if not self._has_room():
            return
        for batch_id in await finish_in_thread(self._store.under_way):
            if not self._has_room() or self._stopping:
                return
            if batch_id not in self._running:
                folder = await finish_in_thread(partial(self._store.take, batch_id))
                if folder is not None:
                    self._begin(folder)

    def _has_room(self) -> bool:
        busy = sum(name not in self._runs or not self._runs[name].is_stalled for name in self._running)
        return busy < AT_ONCE and len(self._running) < MOST

    def _begin(self, folder: BatchFolder) -> None:
        batch_id = folder.order.id
        task = asyncio.create_task(self._run(folder), name=f"batch {batch_id}")
        self._running[batch_id] = task
        task.add_done_callback(lambda _: self._running.pop(batch_id, None))

    async def _run(self, folder: BatchFolder) -> None:
        """Run a batch, and leave it to whoever takes it next if that fails."""
        run = self._runs[folder.order.id] = BatchRun(folder, self._around)
        try:
            await run.run()
        except* StateError as errors:
            _log.warning("%s is broken off, and goes on later: %s", folder.order.id, _first_of(errors))
            await asyncio.sleep(_AGAIN_S)
        except* Exception:  # noqa: BLE001
            # The boundary of a batch: what is wrong with one must not end the process, and so all requests.
            _log.exception("%s is broken off, and goes on later", folder.order.id)
            await asyncio.sleep(_AGAIN_S)
        finally:
            del self._runs[folder.order.id]
            await finish_in_thread(folder.release)

    async def _sweep(self) -> None:
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_EVERY_S
            await finish_in_thread(lambda: self._store.sweep(self._around.wall_clock()))


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return an error of a group, and not of groups alone."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
