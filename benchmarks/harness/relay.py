"""A line between two network interfaces that delays, loses and withholds: `python -m benchmarks.harness.relay A B`.

Ethernet frames that come in at one of them leave by the other. Each line on standard input is a `Conditions` in JSON,
answered with one on standard output once it holds; the end of standard input ends the process. Needs root, and the
interfaces are to be in a namespace where nothing else answers.
"""

from __future__ import annotations

import os
import random
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

import msgspec

_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 15, 23
_SOL_PACKET = 263
_ETH_P_ALL = 3
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE = 33, 32
_BUFFER_BYTES = 1 << 26
_MOST_FRAME_BYTES = 1 << 17
_BATCH = 64
"""Frames that are taken in before others that are due are sent."""


class Conditions(msgspec.Struct, frozen=True):
    """Of both directions: the time that a frame takes, the share of frames that is lost, and whether all are."""

    delay_s: float = 0.0
    loss: float = 0.0
    cut: bool = False


class Direction:
    """Frames from one interface to another, in order."""

    def __init__(self, source: socket.socket, target: socket.socket, seed: int) -> None:
        self.source = source
        self._target = target
        self._draw = random.Random(seed)
        self._frames: deque[tuple[float, bytes]] = deque()
        """Each with the time at which it is due."""

    def take(self, conditions: Conditions) -> None:
        """Take in what has come."""
        for _ in range(_BATCH):
            try:
                frame = self.source.recv(_MOST_FRAME_BYTES)
            except BlockingIOError:
                return
            if not conditions.cut and self._draw.random() >= conditions.loss:
                self._frames.append((time.monotonic() + conditions.delay_s, frame))

    def send(self) -> float | None:
        """Send what is due. Returns the time at which more is; None: there is no more."""
        while self._frames:
            due, frame = self._frames[0]
            if due > time.monotonic():
                return due
            self._frames.popleft()
            # As a line does whose other end is not there, or has no room.
            with suppress(OSError):
                self._target.send(frame)
        return None


def relay(names: tuple[str, str]) -> None:
    """Forward frames until standard input ends."""
    conditions = Conditions()
    first, second = map(_open, names)
    directions = (Direction(first, second, 1), Direction(second, first, 2))
    watched: list[int | socket.socket] = [sys.stdin.fileno(), first, second]
    print("ready", flush=True)
    while True:
        due = [at for at in (direction.send() for direction in directions) if at is not None]
        wait = max(min(due) - time.monotonic(), 0.0) if due else None
        readable, _, _ = select.select(watched, [], [], wait)
        for direction in directions:
            if direction.source in readable:
                direction.take(conditions)
        if watched[0] in readable:
            # Unbuffered: `select` sees no line that is read already.
            if not (line := os.read(sys.stdin.fileno(), 4096)):
                return
            conditions = msgspec.json.decode(line, type=Conditions)
            print("ok", flush=True)


def _open(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # Frames keep what the kernel has left to the device: checksums, and to be cut to the size of a packet.
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
        opened.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    opened.bind((name, _ETH_P_ALL))
    opened.setblocking(False)
    return opened


if __name__ == "__main__":
    relay((sys.argv[1], sys.argv[2]))
