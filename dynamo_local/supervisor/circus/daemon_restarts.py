"""Keeps a circusd running. When one dies, its processes run on, and a replacement takes them over.

Clients find the replacement at the endpoints only once it knows all watchers: to them, circusd was silent for a moment.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Sequence

from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.messages.events import Event
from dynamo_local.core.process.restarts import CircusDeadlines, CircusLimits, CircusRecord, GiveUp, circusd_died
from dynamo_local.supervisor.circus.ahead import CircusAhead
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.circus.daemon import CircusDaemon, CircusFiles
from dynamo_local.supervisor.circus.drain import Drain, Watched
from dynamo_local.supervisor.circus.silence import CircusSilence
from dynamo_local.supervisor.circus.takeover import CircusTakeover
from dynamo_local.supervisor.server.reports.logs import CIRCUSD_LOG
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.upkeep.orphans import Orphans
from dynamo_local.tasks import unless
from state.files import system_errors
from state.paths import Sockets, StatePaths


class CircusRestarts:
    """Runs, replaces and ends the circusd of one server.

    `takeover`: tells a replacement of the watchers. While it is None, as during start-up, the death of circusd ends the
    server. `record` is called with the event of each death of circusd.
    """

    def __init__(
        self, paths: StatePaths, circusd: CircusDaemon, files: CircusFiles, report: Report, deadlines: CircusDeadlines
    ) -> None:
        self._paths = paths
        self._circusd = circusd
        self._files = files
        self._report = report
        self._deadlines = deadlines
        self._in_place = True
        self.takeover: CircusTakeover | None = None
        self.record: Callable[[Event], None] = lambda _: None
        self._silence = CircusSilence(report, deadlines, lambda: self._circusd.kill())

    @classmethod
    def start(
        cls,
        paths: StatePaths,
        sockets: Sockets,
        report: Report,
        deadlines: CircusDeadlines,
        ahead: CircusAhead | None = None,
    ) -> CircusRestarts:
        """Start circusd, or have the one run that was started ahead. Call on the main thread, as
        `CircusDaemon.spawn`."""
        log = paths.log_file(CIRCUSD_LOG)
        files = CircusFiles(sockets.circus_endpoint, sockets.circus_pubsub_endpoint, paths.circus_config, log)
        return cls(paths, CircusDaemon.spawn(files, os.environ, ahead), files, report, deadlines)

    @property
    def pid(self) -> int:
        """The pid of circusd, or of the last one if none runs."""
        return self._circusd.pid

    def client(self) -> CircusClient:
        """A client without a deadline. A circusd that is silent for too long is killed, and replaced."""
        return CircusClient(self._files.endpoint, deadline_s=None, silence=self._silence)

    def renew(self) -> None:
        """Replace a circusd whose sockets were removed. Does nothing while one is being replaced, and during
        start-up."""
        if self.takeover is not None and self._in_place:
            self._circusd.kill()

    async def run(self) -> None:
        """Replace circusd whenever it dies, until cancelled. Raises SupervisorError when it cannot be kept running."""
        record = CircusRecord()
        while True:
            how = await self._circusd.wait()
            if self.takeover is None:
                raise self._ended(f"ended unexpectedly ({how})")
            decision, record = circusd_died(record, self._in_place, CircusLimits(), time.monotonic())
            if isinstance(decision, GiveUp):
                raise self._ended(f"{decision.reason} ({how})")
            self._report.step(f"circusd  ended: {how}; its processes run on")
            self.record(
                Event("death", f"ended: {how}", "its processes run on; another circusd takes over", CIRCUSD_LOG)
            )
            self._in_place = False
            await asyncio.sleep(decision.delay_s)
            with system_errors("cannot start another circusd"):
                await self._replace(self.takeover)

    async def stop(
        self, drain: Callable[[Watched], Drain], circus: CircusClient, order: Sequence[Collection[str]]
    ) -> None:
        """Stop all watchers in that order, then circusd. If circusd dies or is silent, stop the processes without it.

        Call when `run` has ended.
        """
        # While stopping, silence is not waited out: circusd is given up as soon as it would be reported.
        self._silence.deadlines = CircusDeadlines(self._deadlines.report_after_s, self._deadlines.report_after_s)
        if self._in_place and await self._stops(drain(circus), circus, order):
            return
        self._circusd.kill()
        how = await self._circusd.wait()
        self._report.step(f"stopping without circusd ({how})")
        await drain(Orphans(self._paths)).stop_all(order)

    async def end(self, deadline_s: float) -> None:
        """Wait for circusd to end after `stop`; kill it at the deadline."""
        await self._circusd.end(deadline_s)

    async def _replace(self, takeover: CircusTakeover) -> None:
        """Start another circusd, and put it in place once it has taken over. It may die before that."""
        files = self._files.of_next()
        self._circusd = circusd = CircusDaemon.spawn(files, os.environ)
        silence = CircusSilence(self._report, self._deadlines, circusd.kill)
        async with CircusClient(files.endpoint, deadline_s=None, silence=silence) as circus:

            async def take_over() -> None:
                taken_over = await takeover.take_over(circus, circusd.pid)
                self._files.put_next_in_place()
                self._in_place = True
                self._silence.ends()
                self._report.step(f"another circusd runs and has {taken_over}")

            await unless(circusd.wait(), take_over())

    async def _stops(self, drain: Drain, circus: CircusClient, order: Sequence[Collection[str]]) -> bool:
        async def stop() -> None:
            await drain.stop_all(order)
            await circus.quit()

        try:
            return await unless(self._circusd.wait(), stop())
        except SupervisorError as error:
            self._report.step(f"stopping in order failed: {error}")
            return False

    def _ended(self, how: str) -> SupervisorError:
        return SupervisorError(f"circusd {how}", f"its log is {self._files.log}")
