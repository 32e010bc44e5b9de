"""Records results: those that come while others are being written go to the disk together with the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo_local.core.errors import StateError
from dynamo_local.log_once import LogOnce
from dynamo_local.tasks import finish_in_thread
from state.stored.results import Results

_log = logging.getLogger(__name__)

_AGAIN_S = 5.0
"""Before results that could not be written are written again, in seconds."""


class Recorder:
    """Records the results of one batch. `on_recorded` is called whenever some are on the disk."""

    def __init__(self, results: Results, batch_id: str, on_recorded: Callable[[], None]) -> None:
        self._results = results
        self._on_recorded = on_recorded
        self._batch_id = batch_id
        self._answered: list[tuple[str, bytes]] = []
        self._failed: list[tuple[str, bytes]] = []
        self._changed = asyncio.Event()
        self._recorded = asyncio.Event()
        """Set when something was written; then there is another one."""
        self._writing = False
        self._log_once = LogOnce(_log)

    async def record(self, custom_id: str, line: bytes, *, answered: bool) -> None:
        """Return when the result is on the disk, however long that takes: a disk may be full for a while."""
        (self._answered if answered else self._failed).append((custom_id, line))
        self._changed.set()
        while custom_id not in self._results.done:
            await self._recorded.wait()

    async def settled(self) -> None:
        """Wait until all that was recorded is on the disk, also if nobody waits for it any more."""
        while self._writing or self._answered or self._failed:
            await self._recorded.wait()

    async def run(self) -> None:
        """Write what is recorded, until cancelled. What is being written then is written to the end."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._write()

    async def _write(self) -> None:
        answered, self._answered = self._answered, []
        failed, self._failed = self._failed, []
        self._writing = True
        try:
            await finish_in_thread(lambda: self._results.add(answered, failed))
            self._log_once.clear()
        except StateError as error:
            self._log_once.warn(f"results of {self._batch_id} wait: {error}")
            done = self._results.done
            self._answered[:0] = [each for each in answered if each[0] not in done]
            self._failed[:0] = [each for each in failed if each[0] not in done]
            await asyncio.sleep(_AGAIN_S)
            self._changed.set()
        self._writing = False
        self._recorded.set()
        self._recorded = asyncio.Event()
        self._on_recorded()
