"""circusd's control endpoint: commands with typed answers. Foreign failures become SupervisorError here.

circusd runs one state-changing command at a time and refuses others meanwhile (errno 5 without a traceback):
commands are serialised here and repeated until their deadline. It answers "ok" to an `add` whose program
cannot be started: whether a process runs is seen in its status alone.

A circusd that is silent is waited for. When it dies, another one takes its place, with all its watchers and at the same
endpoint (daemon_restarts.py); a command that was under way is sent again to that one. Commands may be repeated.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from dynamo_local.core.errors import SupervisorError
from dynamo_local.supervisor.circus.adopted import living_process
from dynamo_local.supervisor.circus.silence import CircusSilence

_CONFLICT_ERRNO = 5
_CONFLICT_PAUSE_S = 0.05
_RECONNECT_MS = 20
_LOOK_EVERY_S = 0.5
"""Whether circusd is another one, or has been silent for long."""
_IPC = "ipc://"
_GRACEFUL_TIMEOUT_S = 5.0
"""How long circusd itself waits when it has to stop a process. The drain has done so before."""

# The shell opens the log, for its owner alone, and is then replaced by the program. Through circusd's own
# pipes a dying process loses its last lines, and stdout and stderr cannot share a file that is rotated.
_LOG_AND_EXEC = 'old=$(umask); umask 077; exec >>"$1" 2>&1; umask "$old"; shift; exec "$@"'

STOPPED = "stopped"
ACTIVE = "active"


@dataclass(frozen=True)
class WatcherSpec:
    """What circusd is told of a watcher. Output of the process is appended to `log`."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    working_dir: Path
    log: Path

    def properties(self, start: bool) -> dict[str, Any]:
        """The properties of an `add` command."""
        return {
            "name": self.name,
            "cmd": "/bin/sh",
            "args": ["-c", _LOG_AND_EXEC, "sh", str(self.log), *self.argv],
            "start": start,
            "waiting": True,
            "options": {
                "singleton": True,
                # Restarts are decided by the keeper, which knows of back-off and of errors that stay.
                "respawn": False,
                "max_retry": 1,
                "copy_env": True,
                "env": dict(self.environment),
                "working_dir": str(self.working_dir),
                "graceful_timeout": _GRACEFUL_TIMEOUT_S,
            },
        }


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


class CircusClient:
    """One connection to circusd, whichever runs. Use as an async context manager.

    `deadline_s`: for each command; None waits for ever. `silence` hears how long circusd has not answered.
    """

    def __init__(self, endpoint: str, *, deadline_s: float | None = 10.0, silence: CircusSilence | None = None) -> None:
        self._endpoint = endpoint
        self._deadline_s = deadline_s
        self._silence = silence
        self._lock = asyncio.Lock()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
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

    async def statuses(self) -> dict[str, str]:
        """Status of every watcher: "active", "starting", "stopping" or "stopped"."""
        return (await self._ask("status")).statuses

    async def pids(self, name: str) -> tuple[int, ...]:
        """Processes of a watcher that run now; none if there is no such watcher. What was adopted goes by its own
        pid."""
        return tuple(living_process(pid) for pid in await self.children(name))

    async def children(self, name: str) -> tuple[int, ...]:
        """Processes of a watcher that circusd itself has started, and that run now; none if there is no such
        watcher."""
        return tuple((await self._ask("list", absent_ok=True, name=name)).pids)

    async def add(self, spec: WatcherSpec) -> None:
        """Register and start a watcher. One that is registered already is left as it is, and started."""
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
        """Have circusd end. It stops what still runs first."""
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
        call_id = uuid.uuid4().hex
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
                "it may be stopped, or starved by other programs; try again",
            ) from error
        except (zmq.ZMQError, msgspec.DecodeError) as error:
            raise SupervisorError(f"circus failed at {_describe(command, properties)}: {error}") from error

    async def _reply(self, call_id: str, listener: int | None, give_up_at: float) -> _Reply | None:
        """The answer; None once another circusd listens, which does not know of the call. Raises TimeoutError."""
        asked_at = time.monotonic()
        while (answer := await self._received(call_id, min(_LOOK_EVERY_S, give_up_at - time.monotonic()))) is None:
            now = time.monotonic()
            if now >= give_up_at:
                raise TimeoutError
            if self._listener() not in (listener, None):
                return None
            if self._silence is not None:
                self._silence.lasts(now - asked_at)
        return answer

    async def _received(self, call_id: str, within_s: float) -> _Reply | None:
        """The answer to that call, or None. Answers to commands that were abandoned may still arrive."""
        until = time.monotonic() + within_s
        while await self._socket.poll(max(0, int(1000 * (until - time.monotonic())))):
            reply = msgspec.json.decode(await self._socket.recv(), type=_Reply)
            if reply.id == call_id:
                return reply
        return None

    def _listener(self) -> int | None:
        """What tells one circusd at the endpoint from the next: its socket."""
        try:
            return Path(self._endpoint.removeprefix(_IPC)).stat().st_ino
        except FileNotFoundError:
            return None


def _describe(command: str, properties: Mapping[str, Any]) -> str:
    return f"{command} {properties['name']}" if "name" in properties else command
