"""A client of circusd's control endpoint: commands with typed answers. Errors of zmq become SupervisorError here.

circusd runs one state-changing command at a time and refuses others meanwhile (errno 5 without a traceback). So the
client sends one command after the other, and repeats a refused one until its deadline. circusd answers "ok" to an `add`
whose program cannot be started: only the status tells whether a process runs.

When circusd dies, another one takes its place, with all its watchers and at the same endpoint (daemon.py). The
client then sends the command again, so all commands can be repeated without harm.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.process.restarts import CircusDeadlines
from dynamo_local.supervisor.circus.adopted import living_process
from dynamo_local.supervisor.circus.watchers import WatcherSpec
from dynamo_local.supervisor.server.reports.report import Report

# A connection to one of circusd's endpoints.

_RECONNECT_MS = 20


class CircusSocket:
    """A zmq socket that connects to circusd, and to its replacement when circusd dies.

    Use as an async context manager.
    """

    def __init__(self, endpoint: str, kind: int) -> None:
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)

    async def __aenter__(self) -> Self:
        self._socket.connect(self._endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()


# Reports that circusd does not answer, and has it killed when that lasts too long.


@dataclass
class CircusSilence:
    """The silence towards one client. `kill` ends circusd; None in processes that only use it."""

    report: Report
    deadlines: CircusDeadlines = field(default_factory=CircusDeadlines)
    kill: Callable[[], None] | None = None
    _reported_s: float | None = field(default=None, init=False)
    _gave_up: bool = field(default=False, init=False)

    def lasts(self, silent_s: float) -> None:
        """Note that circusd has not answered for so long."""
        if self._gave_up:
            return
        if self.kill is not None and self.deadlines.give_up(silent_s):
            self._gave_up = True
            self.report.step(f"circusd has not answered for {silent_s:.0f} s; it is killed")
            self.kill()
        elif self.deadlines.report(silent_s, self._reported_s):
            self._reported_s = silent_s
            self.report.step(f"circusd has not answered for {silent_s:.0f} s; retrying")

    def ends(self) -> None:
        """Note that circusd has answered, or that another one has replaced it."""
        if self._reported_s is not None and not self._gave_up:
            self.report.step("circusd answers again")
        self._reported_s, self._gave_up = None, False


_CONFLICT_ERRNO = 5
_CONFLICT_PAUSE_S = 0.05
_CHECK_EVERY_S = 0.5
"""Interval at which a waiting client checks whether circusd was replaced, or has been silent for too long."""

_IPC = "ipc://"

STOPPED = "stopped"
ACTIVE = "active"


class _Reply(msgspec.Struct):
    status: str = ""
    id: str | None = None
    reason: str = ""
    errno: int = 0
    tb: str | None = None
    statuses: dict[str, str] = {}
    pids: list[int] = []

    @property
    def is_conflict(self) -> bool:
        return self.status == "error" and self.errno == _CONFLICT_ERRNO and self.tb is None

    @property
    def is_duplicate(self) -> bool:
        return self.status == "error" and self.errno == _CONFLICT_ERRNO and "already exist" in self.reason

    @property
    def is_unknown_watcher(self) -> bool:
        return self.status == "error" and self.reason.startswith("program ") and self.reason.endswith("not found")


class CircusClient(CircusSocket):
    """A connection to the namespace's circusd, also after its replacement. Use as an async context manager.

    `deadline_s`: for each command; None waits for ever. `silence` is told how long circusd has not answered.
    """

    def __init__(self, endpoint: str, *, deadline_s: float | None = 10.0, silence: CircusSilence | None = None) -> None:
        super().__init__(endpoint, zmq.DEALER)
        self._deadline_s = deadline_s
        self._silence = silence
        self._lock = asyncio.Lock()

    async def statuses(self) -> dict[str, str]:
        """Status of every watcher: "active", "starting", "stopping" or "stopped"."""
        return (await self._ask("status")).statuses

    async def pids(self, name: str) -> tuple[int, ...]:
        """Pids of a watcher's processes that run now; none if there is no such watcher. For a process that another one
        stands for (adopted.py), its own pid."""
        return tuple(living_process(pid) for pid in await self.children(name))

    async def children(self, name: str) -> tuple[int, ...]:
        """Pids of a watcher's processes as circusd knows them: its own children. None if there is no such watcher."""
        return tuple((await self._ask("list", absent_ok=True, name=name)).pids)

    async def add(self, spec: WatcherSpec) -> None:
        """Register and start a watcher. If it is registered already, its spec is kept, and it is started."""
        await self._ask("add", duplicate_ok=True, **spec.properties(start=True))
        statuses = await self.statuses()
        if spec.name not in statuses:
            raise SupervisorError(f"circus did not register {spec.name}")
        if statuses[spec.name] == STOPPED:
            await self.start(spec.name)

    async def register(self, spec: WatcherSpec) -> None:
        """Register a watcher without starting it. Harmless if there is one."""
        await self._ask("add", duplicate_ok=True, **spec.properties(start=False))

    async def start(self, name: str) -> None:
        """Start the process of a stopped watcher. Harmless while it runs, and when there is no such watcher."""
        await self._ask("start", absent_ok=True, name=name, waiting=True)

    async def remove(self, name: str) -> None:
        """Forget a watcher, stopping its process if it still runs. Harmless when there is no such watcher."""
        await self._ask("rm", absent_ok=True, name=name, waiting=True)

    async def quit(self) -> None:
        """Have circusd end. It first stops the processes that still run."""
        await self._ask("quit")

    async def _ask(
        self, command: str, *, absent_ok: bool = False, duplicate_ok: bool = False, **properties: Any
    ) -> _Reply:
        give_up_at = time.monotonic() + (math.inf if self._deadline_s is None else self._deadline_s)
        async with self._lock:
            while True:
                reply = await self._exchange(command, properties, give_up_at)
                if reply.status == "ok" or reply.status in (ACTIVE, STOPPED):
                    return reply
                if (absent_ok and reply.is_unknown_watcher) or (duplicate_ok and reply.is_duplicate):
                    return reply
                if not reply.is_conflict or time.monotonic() >= give_up_at:
                    raise SupervisorError(f"circus refused {_describe(command, properties)}: {reply.reason}")
                await asyncio.sleep(_CONFLICT_PAUSE_S)

    async def _exchange(self, command: str, properties: dict[str, Any], give_up_at: float) -> _Reply:
        call_id = os.urandom(16).hex()
        message = msgspec.json.encode({"id": call_id, "command": command, "properties": properties})
        try:
            reply = None
            while reply is None:
                listener = self._listener()
                await self._socket.send(message)
                reply = await self._reply(call_id, listener, give_up_at)
                if self._silence is not None:
                    self._silence.ends()
            return reply
        except TimeoutError as error:
            raise SupervisorError(
                f"circus did not answer {_describe(command, properties)} within {self._deadline_s:g} s",
                "circusd may be stopped, or starved by other programs; try again",
            ) from error
        except (zmq.ZMQError, msgspec.DecodeError) as error:
            raise SupervisorError(f"circus failed at {_describe(command, properties)}: {error}") from error

    async def _reply(self, call_id: str, listener: tuple[int, int] | None, give_up_at: float) -> _Reply | None:
        """Wait for the answer. None once another circusd listens, which never got the call. Raises TimeoutError."""
        asked_at = time.monotonic()
        while (answer := await self._received(call_id, min(_CHECK_EVERY_S, give_up_at - time.monotonic()))) is None:
            now = time.monotonic()
            if now >= give_up_at:
                raise TimeoutError
            if self._listener() not in (listener, None):
                return None
            if self._silence is not None:
                self._silence.lasts(now - asked_at)
        return answer

    async def _received(self, call_id: str, within_s: float) -> _Reply | None:
        """Wait for the answer to that call, for so long. Late answers to earlier commands are dropped."""
        until = time.monotonic() + within_s
        while await self._socket.poll(max(0, int(1000 * (until - time.monotonic())))):
            reply = msgspec.json.decode(await self._socket.recv(), type=_Reply)
            if reply.id == call_id:
                return reply
        return None

    def _listener(self) -> tuple[int, int] | None:
        """What tells circusd's socket from that of the next circusd; None if there is no socket. A file system may give
        the next one the same inode, but not the same time."""
        try:
            found = Path(self._endpoint.removeprefix(_IPC)).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


def _describe(command: str, properties: Mapping[str, Any]) -> str:
    return f"{command} {properties['name']}" if "name" in properties else command


# circusd's events: which process was started, which ended, and with which exit code.

_REAP = "reap"
_SPAWN = "spawn"


@dataclass(frozen=True)
class ProcessEnded:
    """A watcher's process was reaped. `exit_code` is negative for a signal, None if circusd does not know it.

    `watcher` is in lower case, as circus spells it.
    """

    watcher: str
    pid: int
    exit_code: int | None


@dataclass(frozen=True)
class ProcessBegan:
    """A watcher's process was started. `watcher` is in lower case, as circus spells it."""

    watcher: str
    pid: int


class _Event(msgspec.Struct):
    process_pid: int
    exit_code: int | None = None


class EventStream(CircusSocket):
    """Receives events from the moment at which it is entered. Use as an async context manager."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"watcher.")

    async def next(self) -> ProcessBegan | ProcessEnded:
        """Wait for the next process that begins or ends."""
        while True:
            topic, payload, *_ = await self._socket.recv_multipart()
            event = parse_event(topic, payload)
            if event is not None:
                return event


def parse_event(topic: bytes, payload: bytes) -> ProcessBegan | ProcessEnded | None:
    """The event if a process began or ended; None for all other events."""
    parts = topic.decode(errors="replace").split(".")
    if len(parts) != 3 or parts[2] not in (_REAP, _SPAWN):
        return None
    try:
        event = msgspec.json.decode(payload, type=_Event)
    except msgspec.DecodeError:
        return None
    if parts[2] == _SPAWN:
        return ProcessBegan(parts[1], event.process_pid)
    return ProcessEnded(parts[1], event.process_pid, event.exit_code)
