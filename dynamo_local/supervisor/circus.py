"""The arbiter's control endpoint: commands with typed answers. Foreign failures become SupervisorError here.

circusd runs one state-changing command at a time and refuses others meanwhile (errno 5 without a traceback):
commands are serialised here and repeated until their deadline. It answers "ok" to an `add` whose program
cannot be started: whether a process runs is seen in its status alone.
"""

from __future__ import annotations

import asyncio
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

_CONFLICT_ERRNO = 5
_CONFLICT_PAUSE_S = 0.05
_RECONNECT_MS = 20
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

    def properties(self) -> dict[str, Any]:
        """The properties of an `add` command."""
        return {
            "name": self.name,
            "cmd": "/bin/sh",
            "args": ["-c", _LOG_AND_EXEC, "sh", str(self.log), *self.argv],
            "start": True,
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
    """One connection to circusd. Use as an async context manager."""

    def __init__(self, endpoint: str, *, deadline_s: float = 10.0) -> None:
        self._endpoint = endpoint
        self._deadline_s = deadline_s
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
        """Processes of a watcher that run now; none if there is no such watcher."""
        reply = await self._ask("list", absent_ok=True, name=name)
        return tuple(reply.pids)

    async def add(self, spec: WatcherSpec) -> None:
        """Register and start a watcher. One that is registered already is left as it is, and started."""
        await self._ask("add", duplicate_ok=True, **spec.properties())
        statuses = await self.statuses()
        if spec.name not in statuses:
            raise SupervisorError(f"circus did not register {spec.name}")
        if statuses[spec.name] == STOPPED:
            await self.start(spec.name)

    async def start(self, name: str) -> None:
        """Start the process of a stopped watcher. Harmless while it runs, and when there is no such watcher."""
        await self._ask("start", absent_ok=True, name=name, waiting=True)

    async def signal(self, name: str, signum: int) -> None:
        """Send a signal to the process of a watcher. Harmless when it is gone."""
        await self._ask("signal", absent_ok=True, name=name, signum=signum)

    async def remove(self, name: str) -> None:
        """Forget a watcher, stopping its process if it still runs. Harmless when there is no such watcher."""
        await self._ask("rm", absent_ok=True, name=name, waiting=True)

    async def quit(self) -> None:
        """Have circusd end. It stops what still runs first."""
        await self._ask("quit")

    async def _ask(
        self, command: str, *, absent_ok: bool = False, duplicate_ok: bool = False, **properties: Any
    ) -> _Reply:
        give_up_at = time.monotonic() + self._deadline_s
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
        message = {"id": call_id, "command": command, "properties": properties}
        try:
            async with asyncio.timeout(max(0.0, give_up_at - time.monotonic())):
                await self._socket.send(msgspec.json.encode(message))
                while True:
                    reply = msgspec.json.decode(await self._socket.recv(), type=_Reply)
                    # An answer to a command that was abandoned may still arrive.
                    if reply.id == call_id:
                        return reply
        except TimeoutError as error:
            raise SupervisorError(
                f"circus did not answer {_describe(command, properties)} within {self._deadline_s:g} s"
            ) from error
        except (zmq.ZMQError, msgspec.DecodeError) as error:
            raise SupervisorError(f"circus failed at {_describe(command, properties)}: {error}") from error


def _describe(command: str, properties: Mapping[str, Any]) -> str:
    return f"{command} {properties['name']}" if "name" in properties else command
