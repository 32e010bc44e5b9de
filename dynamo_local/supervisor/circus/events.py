"""circusd's events: which process was started, which ended, and with which exit code."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import zmq

from dynamo_local.supervisor.circus.socket import CircusSocket

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
