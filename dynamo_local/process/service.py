"""The life of one service process, from the bus connection to the last hook. `main.py` runs it.

starting   clients injected, the service object made, its on_start hooks run
ready      its endpoints answer
draining   told to end (SIGTERM, SIGINT, lease revoked): calls under way finish, then on_shutdown hooks
failed     it could not start, or one of its tasks died, be it while draining; then as draining
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import Announcer
from dynamo_local.bus.rpc.client import CallClient
from dynamo_local.bus.rpc.server import CallServer
from dynamo_local.core.errors import DynamoError, NotRunningError, StateError
from dynamo_local.core.messages.presence import LeaseRevoked, Presence
from dynamo_local.core.names import Subjects
from dynamo_local.process.context import ServiceContext
from dynamo_local.process.startup import Startup
from dynamo_local.sdk.graph import import_service
from dynamo_local.sdk.service import bind_clients, spec_of
from dynamo_local.tasks import TaskGuard
from state.files import DiskError
from state.holding import Bound, occupy
from state.locks import LockTimeoutError
from state.model import State
from state.paths import Sockets
from state.processes import this_process
from state.remains import SEGMENTS_ENV, make_folder, segment_prefix
from state.store import StateStore
from state.transitions import clear_lease, set_lease, set_role

_log = logging.getLogger(__name__)

CALLS_DEADLINE_S = 10.0
"""For endpoint calls under way when the process is told to end."""

HOOK_DEADLINE_S = 120.0
"""For each on_shutdown hook. Services have shorter ones of their own, and the server kills in the end."""

_CANCEL_DEADLINE_S = 10.0
_TRY_AGAIN_S = 1.0


@dataclass(frozen=True)
class _End:
    """Why a process ends, and with which status. Without an error it was told to."""

    error: BaseException | None = None
    code: int = 0


async def run_service(placement: Startup, told_to_end: asyncio.Event) -> int:
    """Live until told to end or until something fails. Returns the exit status; errors are reported."""
    tasks = TaskGuard()
    connecting = asyncio.create_task(Bus.connect(placement.bus, name=str(placement.watcher)))
    end = await _race(connecting, told_to_end, tasks)
    if end is not None:
        if end.error is not None:
            report(end.error)
        return end.code
    bus = connecting.result()
    try:
        return await ServiceProcess(placement, bus, tasks, told_to_end).live()
    finally:
        await bus.close()


class ServiceProcess:
    """One service object and what surrounds it."""

    def __init__(self, placement: Startup, bus: Bus, tasks: TaskGuard, told_to_end: asyncio.Event) -> None:
        self._placement = placement
        self._bus = bus
        self._tasks = tasks
        self._told_to_end = told_to_end
        self._lease = secrets.token_hex(8)
        self._store = StateStore(placement.paths)
        self._subjects = Subjects(placement.watcher.namespace)
        self._announcer = Announcer(bus, self._subjects, self._first_presence())
        self._client = CallClient(bus, self._subjects)
        self._server = CallServer(bus, self._subjects, tasks)
        self._instance: object | None = None
        self._marks: list[Bound] = []
        """Never given back but by the kernel."""

    async def live(self) -> int:
        """The whole life. Returns the exit status."""
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
        """Say why the process fails, once: on stderr, and to those who count on it."""
        if not self._failed:
            self._announcer.update(state="failed", detail=report(error))

    async def _start(self) -> None:
        placement = self._placement
        await self._announcer.announce()
        state = await self._enter_lease()
        # Before there is an engine. What this process forks is on them, too, until it is gone.
        self._marks = await asyncio.to_thread(occupy, os.environ, state.owner.pid)
        # A process that replaces another goes on in its role.
        self._announcer.update(role=state.components[str(placement.watcher)].role)
        await self._bus.listen(self._subjects.revoked, LeaseRevoked, self._on_revoked)
        await self._client.start()
        self._tasks.spawn("calls made", self._client.run())
        cls = import_service(placement.service.target)
        sockets = Sockets.of_endpoint(state.circus_endpoint)
        folder = await asyncio.to_thread(make_folder, sockets, this_process(), self._lease)
        os.environ[SEGMENTS_ENV] = segment_prefix(placement.paths, self._lease)
        self._instance = self._make(cls, folder)
        for hook in spec_of(cls).on_start:
            await getattr(self._instance, hook)()
        await self._server.start(self._instance)
        self._tasks.spawn("calls served", self._server.run())

    def _make(self, cls: type, private_dir: Path) -> object:
        """The service object, with its clients in place before its __init__ runs."""
        linked = self._placement.service.depends_on
        dependencies = spec_of(cls).dependencies.items()
        instance: object = cls.__new__(cls)  # type: ignore[call-overload]
        bind_clients(
            instance,
            {name: self._client.service(target) for name, target in dependencies if target.__name__ in linked},
        )
        context = ServiceContext(
            watcher=self._placement.watcher,
            lease=self._lease,
            graph=self._placement.graph,
            service=self._placement.service,
            bus=self._bus,
            announcer=self._announcer,
            private_dir=private_dir,
            tasks=self._tasks,
            take_role=self._take_role,
        )
        if _takes_context(cls):
            cls.__init__(instance, context)  # type: ignore[misc]  # made by hand: see above
        else:
            cls.__init__(instance)  # type: ignore[misc]
        return instance

    async def _shut_down(self) -> bool:
        """End everything in order, each step with a deadline. Returns whether the hooks went well."""
        await self._announcer.announce()
        await self._server.stop(CALLS_DEADLINE_S)
        clean = True
        if self._instance is not None:
            for hook in spec_of(type(self._instance)).on_shutdown:
                clean = await _run_hook(self._instance, hook) and clean
        await self._client.stop()
        await self._forget_lease()
        for name in await self._tasks.close(_CANCEL_DEADLINE_S):
            _log.warning("task %s did not end within %g s", name, _CANCEL_DEADLINE_S)
        return clean

    async def _enter_lease(self) -> State:
        watcher, said = self._placement.watcher, ""
        while True:
            try:
                return await asyncio.to_thread(
                    self._store.update, lambda state: set_lease(state, watcher, self._lease, os.getpid())
                )
            except (DiskError, LockTimeoutError) as error:
                # A disk that is full, say: no reason to end.
                if str(error) != said:
                    _log.warning("the lease is not in the statefile yet: %s", error)
                said = str(error)
            await asyncio.sleep(_TRY_AGAIN_S)

    async def _take_role(self, role: str) -> None:
        watcher = self._placement.watcher
        await asyncio.to_thread(self._store.update, lambda state: set_role(state, watcher, self._lease, role))
        self._announcer.update(role=role)

    async def _forget_lease(self) -> None:
        watcher = self._placement.watcher
        try:
            await asyncio.to_thread(self._store.update, lambda state: clear_lease(state, watcher, self._lease))
        except NotRunningError:
            # The server has removed the statefile already.
            return
        except StateError as error:
            _log.warning("the lease stays in the statefile: %s", error)

    async def _on_revoked(self, revoked: LeaseRevoked) -> None:
        if revoked.lease == self._lease:
            _log.info("the lease was revoked")
            self._told_to_end.set()

    def _first_presence(self) -> Presence:
        service = self._placement.service
        return Presence(
            watcher=str(self._placement.watcher),
            component=service.name,
            role=service.role,
            lease=self._lease,
            pid=os.getpid(),
            state="starting",
            started_at=time.monotonic(),
        )


def report(error: BaseException) -> str:
    """Say on stderr, in one line, why the process fails; what is not ours, with its traceback before. Returns
    the line."""
    if isinstance(error, DynamoError):
        line = " ".join(str(error).split())
    else:
        _log.error("unexpected error", exc_info=error)
        line = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"error: {line}", file=sys.stderr, flush=True)
    return line


async def _race(work: asyncio.Task[Any], told_to_end: asyncio.Event, tasks: TaskGuard) -> _End | None:
    """Wait for the work. None: it is done. Otherwise it failed, a side task died, or the process is to end;
    the work is cancelled then."""
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
            # Looked at, or asyncio reports them as forgotten.
            _error_of(contender)


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError("it was cancelled") if task.cancelled() else task.exception()


async def _run_hook(instance: object, hook: str) -> bool:
    name = f"{type(instance).__name__}.{hook}"
    try:
        await asyncio.wait_for(getattr(instance, hook)(), HOOK_DEADLINE_S)
    except TimeoutError:
        report(StateError(f"{name} did not end within {HOOK_DEADLINE_S:g} s"))
    except Exception as error:  # noqa: BLE001
        # The boundary of a hook: the other hooks must run whatever this one does.
        report(error)
    else:
        return True
    return False


def _takes_context(cls: type) -> bool:
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        return False
    return len(inspect.signature(cls.__init__).parameters) > 1  # type: ignore[misc]
