"""circusd as a child of `dynamo serve`, in a session of its own. It dies with its parent; its own children outlive
it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.process.restarts import CircusDeadlines, CircusLimits, CircusRecord, GiveUp, circusd_died
from dynamo_local.process.endings import ended
from dynamo_local.supervisor.circus.adopted import stands_in
from dynamo_local.supervisor.circus.ahead import CircusAhead
from dynamo_local.supervisor.circus.client import CircusClient, CircusSilence
from dynamo_local.supervisor.circus.drain import Drain, Watched
from dynamo_local.supervisor.circus.watchers import WatcherSpecs
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.supervisor.server.launch.plan import plan_watcher
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.supervisor.server.reports.logs import CIRCUSD_LOG
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.upkeep.orphans import Orphans
from dynamo_local.tasks import unless
from state.files import open_log, system_errors, write_private
from state.machine.processes import Process, ProcFs, alive
from state.paths import Sockets, StatePaths
from state.statefile.model import Component, State
from state.statefile.store import StateStore

CHECK_DELAY_S = 5.0
"""Interval at which circusd looks for processes that ended. It also looks whenever one ends (circusd.py)."""


@dataclass(frozen=True)
class CircusFiles:
    """The files of one circusd. `endpoint` and `pubsub_endpoint` are ipc:// URLs, in directories of mode 0700."""

    endpoint: str
    pubsub_endpoint: str
    config: Path
    log: Path

    def of_next(self) -> CircusFiles:
        """The files of a replacement, which listens beside the endpoints until it has taken over."""
        return replace(self, endpoint=f"{self.endpoint}{_NEXT}", pubsub_endpoint=f"{self.pubsub_endpoint}{_NEXT}")

    def put_next_in_place(self) -> None:
        """Move the replacement's sockets to the endpoints, where clients find them."""
        for endpoint in (self.pubsub_endpoint, self.endpoint):
            path = Path(endpoint.removeprefix(_IPC))
            path.with_name(f"{path.name}{_NEXT}").replace(path)


_IPC = "ipc://"
_NEXT = ".new"

_ENDPOINT_ENV = "DYN_CIRCUS_ENDPOINT"
"""Set by the server in circusd: socket for commands."""

_PUBSUB_ENV = "DYN_CIRCUS_PUBSUB"
"""Set by the server in circusd: socket for events."""

# Paths come by the environment: circus's configuration cannot quote, and cuts a value at " ;". circusd listens on the
# two sockets only; without the empty multicast endpoint it would answer anybody on the network.
_CONFIG = f"""\
[circus]
endpoint = $(circus.env.{_ENDPOINT_ENV})
pubsub_endpoint = $(circus.env.{_PUBSUB_ENV})
multicast_endpoint =
statsd = False
httpd = False
check_delay = {CHECK_DELAY_S}
loglevel = WARNING
"""


class CircusDaemon:
    """A running circusd."""

    def __init__(self, process: subprocess.Popen[bytes], files: CircusFiles) -> None:
        self._process = process
        self.files = files

    @classmethod
    def spawn(
        cls, files: CircusFiles, environment: Mapping[str, str], ahead: CircusAhead | None = None
    ) -> CircusDaemon:
        """Start circusd, or have the one run that was started ahead. Call on the main thread: circusd dies with the
        thread that forks it."""
        write_private(files.config, _CONFIG.encode())
        open_log(files.log).close()
        ahead = ahead or CircusAhead.launch(environment)
        ahead.begin(
            files.config,
            files.log,
            {**environment, _ENDPOINT_ENV: files.endpoint, _PUBSUB_ENV: files.pubsub_endpoint},
        )
        return cls(ahead.process, files)

    @property
    def pid(self) -> int:
        """The pid of circusd, which is the parent of the watchers' processes."""
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    async def wait(self) -> str:
        """Wait until circusd has ended. Returns the way it ended, in words."""
        if self.running:
            await ended(self.pid)
        return describe_exit(self._process.wait())

    async def end(self, deadline_s: float) -> None:
        """Wait for circusd to end; kill it at the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """SIGKILL circusd. Harmless when it is gone."""
        self._process.kill()


def describe_exit(code: int | None) -> str:
    """A process's end in words: "exit code 1", "killed by SIGKILL"."""
    if code is None:
        return "exit code not known"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


# Tells a new circusd, after the previous one has died, of all watchers and of the processes that they have.

_KILL_S = 10.0
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class TakeoverPlan:
    """`adopted`: watchers with their processes. `idle`: watchers whose process is gone. `strays`: processes without a
    claim, which are killed."""

    adopted: Mapping[str, Process]
    idle: tuple[str, ...]
    strays: tuple[Process, ...]


def plan_takeover(state: State, running: Mapping[str, Process]) -> TakeoverPlan:
    """Decide what becomes of each watcher, by the statefile and the processes that run. Pure.

    Watchers of other nodes are theirs. A watcher without a process is left out while a change of it is under way:
    whoever makes the change adds it again.
    """
    holding = {name: component for name, component in state.here.items() if component.holds}
    return TakeoverPlan(
        {name: running[name] for name in holding if name in running},
        tuple(name for name, component in holding.items() if name not in running and component.phase is None),
        tuple(process for name, process in running.items() if name not in holding),
    )


@dataclass(frozen=True)
class CircusTakeover:
    """Makes takeovers of one server. `blueprint`: gives the blueprint as it is now. `machinery`: plans of watchers that
    are no service of the graph."""

    store: StateStore
    blueprint: Callable[[], Blueprint]
    specs: WatcherSpecs
    machinery: Mapping[str, WatcherPlan]

    async def take_over(self, circus: CircusClient, circusd_pid: int) -> str:
        """Tell the circusd of that pid of all watchers. The restarter starts idle ones. Returns a summary in words."""
        state = await asyncio.to_thread(self.store.read)
        # After the state: the templates of an endpoint's revision precede its claims, and outlast its processes.
        blueprint = await asyncio.to_thread(self.blueprint)
        found = plan_takeover(state, await Orphans(self.specs.paths).look())
        await self._end(found.strays)
        for name, process in found.adopted.items():
            await circus.add(self.specs.adopting(self._plan(blueprint, state.components[name]), process, circusd_pid))
        dead = [name for name, process in found.adopted.items() if not await _is_followed(circus, name, process)]
        for name in dead:
            # Otherwise its next process would run before the restarter has seen the end of this one.
            await circus.remove(name)
        idle = (*found.idle, *dead)
        for name in idle:
            await circus.register(self.specs.of(self._plan(blueprint, state.components[name])))
        running = len(found.adopted) - len(dead)
        return f"{_counted(running)}{_without(idle)}"

    def _plan(self, blueprint: Blueprint, component: Component) -> WatcherPlan:
        name = component.watcher_name
        if name in self.machinery:
            return self.machinery[name]
        template = blueprint.template(component.component, component.revision)
        return plan_watcher(template, component.watcher, blueprint.inventory, component.devices)

    async def _end(self, strays: Iterable[Process]) -> None:
        await asyncio.to_thread(ProcFs().end, tuple(strays), 0.0, _KILL_S)


async def _is_followed(circus: CircusClient, name: str, process: Process) -> bool:
    """Wait until circusd's process of the watcher stands for the adopted one. Returns whether that one lives."""
    while alive(process.pid, process.start_time):
        if any(stands_in(pid) for pid in await circus.children(name)):
            return True
        await asyncio.sleep(_LOOK_EVERY_S)
    return False


def _counted(running: int) -> str:
    return "the process that runs" if running == 1 else f"the {running} processes that run"


def _without(idle: tuple[str, ...]) -> str:
    return f"; ended meanwhile: {', '.join(idle)}" if idle else ""


# Keeps a circusd running. When one dies, its processes run on, and a replacement takes them over.


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
