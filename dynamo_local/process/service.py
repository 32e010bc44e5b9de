"""The life of one service process, from the bus connection to the last hook. `main.py` runs it. Its states:

starting   clients are injected, the service object is made, its on_start hooks run
ready      its endpoints answer
draining   told to end (SIGTERM, SIGINT, lease revoked): calls under way finish, then on_shutdown hooks run
failed     the start failed, or a task died, also while draining; then the same steps as in draining
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus, follow_address
from dynamo_local.bus.presence import Announcer
from dynamo_local.bus.rpc import CallClient, CallServer
from dynamo_local.core.codec import prepare_structs
from dynamo_local.core.errors import ConfigError, DynamoError, GraphError, NotRunningError, StateError
from dynamo_local.core.messages.presence import LeaseRevoked, Presence
from dynamo_local.core.names import WATCHER_ENV, Watcher, parse_watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.sdk.graph import import_service
from dynamo_local.sdk.service import bind_clients, spec_of
from dynamo_local.tasks import TaskGuard
from state.devices.holding import Bound, occupy
from state.machine.identity import machine_id
from state.machine.processes import this_process
from state.paths import Sockets, StatePaths
from state.remains import SEGMENTS_ENV, make_folder, segment_prefix
from state.statefile.store import StateStore
from state.statefile.transitions import claimed

# Reads what a service process needs to start: its watcher, its claim, its graph, and the address of the bus.


@dataclass(frozen=True)
class Startup:
    """The identity of a service process, and where it finds the bus and its server's files.

    `role`: that of the process before it, if there was one. `revision`: that it serves. `server_pid`,
    `circus_endpoint`: of its server.
    """

    watcher: Watcher
    graph: ResolvedGraph
    service: ResolvedService
    bus: BusAddress
    paths: StatePaths
    role: str
    revision: str
    server_pid: int
    circus_endpoint: str


def read_startup(namespace: str, service: str, environ: Mapping[str, str]) -> Startup:
    """Read what the server wrote for this process. Raises ConfigError, GraphError, NotRunningError, BusError, or
    StateError if the process has no claim."""
    watcher = parse_watcher(environ.get(WATCHER_ENV, ""))
    if (watcher.namespace, watcher.service) != (namespace, service):
        raise ConfigError(f"{WATCHER_ENV} is {watcher}, which is no watcher of {service} in {namespace}")
    paths = StatePaths.of(namespace, environ)
    # Only read: the server alone writes it, by what this process announces.
    state = StateStore(paths).read()
    entry = claimed(state, watcher)
    graph = _read_graph(paths.graph_of(entry.revision))
    if graph.namespace != namespace:
        raise GraphError(f"{paths.graph_of(entry.revision)} is of namespace {graph.namespace}, not {namespace}")
    address = BusAddress.load(paths.bus_file)
    of_server = state.owner.pid, state.circus_endpoint
    return Startup(watcher, graph, graph.service(service), address, paths, entry.role, entry.revision, *of_server)


def _read_graph(path: Path) -> ResolvedGraph:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotRunningError(
            f"no graph in {path}: {error.strerror}", "services are started by `dynamo serve`"
        ) from error
    return ResolvedGraph.from_json(data)


_log = logging.getLogger(__name__)

CALLS_DEADLINE_S = 10.0
"""For endpoint calls that are under way when the process is told to end."""

HOOK_DEADLINE_S = 120.0
"""For each on_shutdown hook. Services have shorter deadlines of their own; in the end the server kills the process."""

_CANCEL_DEADLINE_S = 10.0


@dataclass(frozen=True)
class _End:
    """The reason why a process ends, and its exit status. Without an error, it was told to end."""

    error: BaseException | None = None
    code: int = 0


async def run_service(startup: Startup, told_to_end: asyncio.Event) -> int:
    """Run the service until it is told to end or fails. Returns the exit status; errors are reported on stderr."""
    tasks = TaskGuard()
    connecting = asyncio.create_task(Bus.connect(startup.bus, name=str(startup.watcher), file=startup.paths.bus_file))
    end = await _race(connecting, told_to_end, tasks)
    if end is not None:
        if end.error is not None:
            report(end.error)
        return end.code
    bus = connecting.result()
    try:
        return await ServiceProcess(startup, bus, tasks, told_to_end).run()
    finally:
        await bus.close()


class ServiceProcess:
    """A service object, with its clients, endpoints, presence and lease."""

    def __init__(self, startup: Startup, bus: Bus, tasks: TaskGuard, told_to_end: asyncio.Event) -> None:
        self._startup = startup
        self._bus = bus
        self._tasks = tasks
        self._told_to_end = told_to_end
        self._lease = secrets.token_hex(8)
        self._subjects = Subjects(startup.watcher.namespace, startup.revision)
        self._announcer = Announcer(bus, self._subjects, self._first_presence())
        # Services of a graph call each other, whether or not they serve a model.
        calls = Subjects(startup.watcher.namespace, startup.watcher.revision)
        self._client = CallClient(bus, calls)
        self._server = CallServer(bus, calls, tasks)
        self._instance: object | None = None
        self._marks: list[Bound] = []
        """Marks on this process's devices (state.devices.holding). Kept until the kernel frees them."""

    async def run(self) -> int:
        """Start, serve until told to end or until a failure, and shut down. Returns the exit status."""
        self._tasks.on_failure(self._fail)
        self._tasks.spawn("presence", self._announcer.run())
        self._tasks.spawn("bus", self._bus.failed())
        end = await _race(asyncio.create_task(self._start()), self._told_to_end, self._tasks)
        if end is None:
            self._announcer.update(state="ready", detail="")
            forever = asyncio.create_task(asyncio.Event().wait())
            end = await _race(forever, self._told_to_end, self._tasks) or _End()
        if end.error is None:
            self._announcer.update(state="draining", detail="")
        else:
            self._fail(end.error)
        clean = await self._shut_down()
        return end.code if clean and not self._failed else max(end.code, 1)

    @property
    def _failed(self) -> bool:
        return self._announcer.presence.state == "failed"

    def _fail(self, error: BaseException) -> None:
        """Report the first failure of the process, on stderr and in its presence. Later ones follow from it."""
        if not self._failed:
            self._announcer.update(state="failed", detail=report(error))

    async def _start(self) -> None:
        startup = self._startup
        await self._announcer.announce()
        # Before the engine starts: its processes inherit the marks, which last until the last of them is gone.
        self._marks = await asyncio.to_thread(occupy, os.environ, startup.server_pid)
        await self._bus.listen(self._subjects.revoked, LeaseRevoked, self._on_revoked)
        await follow_address(self._bus, self._subjects, self._lease)
        await self._client.start()
        self._tasks.spawn("calls made", self._client.run())
        cls = import_service(startup.service.target)
        prepare_structs()
        sockets = Sockets.of_endpoint(startup.circus_endpoint)
        folder = await asyncio.to_thread(make_folder, sockets, this_process(), self._lease)
        os.environ[SEGMENTS_ENV] = segment_prefix(startup.paths, self._lease)
        self._instance = self._make(cls, folder)
        for hook in spec_of(cls).on_start:
            await getattr(self._instance, hook)()
        await self._server.start(self._instance)
        self._tasks.spawn("calls served", self._server.run())

    def _make(self, cls: type, private_dir: Path) -> object:
        """Make the service object. Its clients are in place before its __init__ runs."""
        linked = self._startup.service.depends_on
        dependencies = spec_of(cls).dependencies.items()
        instance: object = cls.__new__(cls)  # type: ignore[call-overload]
        bind_clients(
            instance,
            {name: self._client.service(target) for name, target in dependencies if target.__name__ in linked},
        )
        context = ServiceContext(
            watcher=self._startup.watcher,
            revision=self._startup.revision,
            lease=self._lease,
            graph=self._startup.graph,
            service=self._startup.service,
            bus=self._bus,
            announcer=self._announcer,
            private_dir=private_dir,
            tasks=self._tasks,
        )
        if _takes_context(cls):
            cls.__init__(instance, context)  # type: ignore[misc]  # called by hand, after the clients are bound
        else:
            cls.__init__(instance)  # type: ignore[misc]
        return instance

    async def _shut_down(self) -> bool:
        """End everything in order, each step with a deadline. Returns whether all hooks succeeded."""
        await self._announcer.announce()
        await self._server.stop(CALLS_DEADLINE_S)
        clean = True
        if self._instance is not None:
            for hook in spec_of(type(self._instance)).on_shutdown:
                clean = await _run_hook(self._instance, hook) and clean
        await self._client.stop()
        for name in await self._tasks.close(_CANCEL_DEADLINE_S):
            _log.warning("task %s did not end within %g s", name, _CANCEL_DEADLINE_S)
        return clean

    async def _on_revoked(self, revoked: LeaseRevoked) -> None:
        if revoked.lease == self._lease:
            _log.info("the server has taken this process out of service (its lease was revoked): it ends")
            self._told_to_end.set()

    def _first_presence(self) -> Presence:
        service = self._startup.service
        return Presence(
            watcher=str(self._startup.watcher),
            component=service.name,
            role=self._startup.role,
            lease=self._lease,
            pid=os.getpid(),
            state="starting",
            started_at=time.monotonic(),
            machine=machine_id(),
            revision=self._startup.revision,
        )


def report(error: BaseException) -> str:
    """Print on stderr, in one line, why the process fails, and return the line. Unexpected errors are logged with their
    traceback before."""
    if isinstance(error, DynamoError):
        line = " ".join(str(error).split())
    else:
        _log.error("unexpected error", exc_info=error)
        line = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"error: {line}", file=sys.stderr, flush=True)
    return line


async def _race(work: asyncio.Task[Any], told_to_end: asyncio.Event, tasks: TaskGuard) -> _End | None:
    """Wait until the work is done, and return None. If the work fails, a task of the process dies, or the process is
    told to end, cancel the work and return that."""
    told = asyncio.create_task(told_to_end.wait())
    died = asyncio.create_task(tasks.failed())
    contenders: set[asyncio.Task[Any]] = {work, told, died}
    try:
        await asyncio.wait(contenders, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            return _End(died.exception(), 1)
        if work.done():
            error = _error_of(work)
            return None if error is None else _End(error, getattr(error, "exit_code", 1))
        return _End()
    finally:
        for contender in contenders:
            contender.cancel()
        done, _ = await asyncio.wait(contenders, timeout=_CANCEL_DEADLINE_S)
        for contender in done:
            # Read the exception, or asyncio logs that it was never retrieved.
            _error_of(contender)


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError("it was cancelled") if task.cancelled() else task.exception()


async def _run_hook(instance: object, hook: str) -> bool:
    name = f"{type(instance).__name__}.{hook}"
    try:
        async with asyncio.timeout(HOOK_DEADLINE_S):
            await getattr(instance, hook)()
    except TimeoutError:
        report(StateError(f"{name} did not end within {HOOK_DEADLINE_S:g} s"))
    except Exception as error:  # noqa: BLE001
        # Any error of a hook: the other hooks must run all the same.
        report(error)
    else:
        return True
    return False


def _takes_context(cls: type) -> bool:
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        return False
    return len(inspect.signature(cls.__init__).parameters) > 1  # type: ignore[misc]
