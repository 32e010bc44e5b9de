"""circusd's events: which process was started, which ended, and with which exit code."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
import zmq
import zmq.asyncio

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


class EventStream:
    """Receives events from the moment at which it is entered. Use as an async context manager."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"watcher.")

    async def __aenter__(self) -> Self:
        self._socket.connect(self._endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()

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
