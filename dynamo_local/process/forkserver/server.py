"""Forks, one process for each order. It has one thread and blocks nowhere for long: it must be fit to be forked."""

from __future__ import annotations

import os
import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass

from dynamo_local.core.errors import DecodeError
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.preload import Preloaded

_ORDER_DEADLINE_S = 2.0
"""For a launcher to say what it wants, which it does at once."""


@dataclass(frozen=True)
class Birth:
    """What a forked process was ordered to be. `descriptors`: see protocol.py."""

    order: protocol.Order
    descriptors: tuple[int, ...]


@dataclass(frozen=True)
class _Child:
    pid: int
    pidfd: int
    launcher: socket.socket


class ForkServer:
    """One listening socket, and a connection for each living child."""

    def __init__(self, listener: socket.socket, preloaded: Preloaded) -> None:
        self._listener = listener
        self._preloaded = preloaded
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> Birth:
        """Fork for ever. Returns in the forked processes only, which hold nothing of the fork server's any more."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._listener:
                    self._bury(self._children.pop(key.fd))
                elif (birth := self._admit()) is not None:
                    return birth

    def _admit(self) -> Birth | None:
        launcher, _ = self._listener.accept()
        launcher.settimeout(_ORDER_DEADLINE_S)
        try:
            order, descriptors = protocol.receive(launcher, protocol.Order, protocol.FORKED_DESCRIPTORS)
        except (OSError, DecodeError) as error:
            # It has ended meanwhile, or is none of ours.
            print(f"warning: an order was not understood: {error}", flush=True)
            launcher.close()
            return None
        objection = self._preloaded.objection(order.environ, order.cwd)
        if len(descriptors) != protocol.FORKED_DESCRIPTORS:
            objection = f"{len(descriptors)} descriptors came with the order"
        if objection is None:
            return self._fork(launcher, Birth(order, tuple(descriptors)))
        protocol.close(descriptors)
        self._refuse(launcher, objection)
        return None

    def _fork(self, launcher: socket.socket, birth: Birth) -> Birth | None:
        try:
            pid = os.fork()
        except OSError as error:
            self._refuse(launcher, f"the system does not let it: {error.strerror}")
        else:
            if pid == 0:
                launcher.close()
                self._let_go()
                return birth
            self._adopt(pid, launcher)
        protocol.close(birth.descriptors)
        return None

    def _adopt(self, pid: int, launcher: socket.socket) -> None:
        child = _Child(pid, os.pidfd_open(pid), launcher)
        self._children[child.pidfd] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ)
        # If the launcher is gone, the child is as good as dead.
        with suppress(OSError):
            protocol.send(launcher, protocol.Answer(pid), (child.pidfd,))
        print(f"forked {pid}", flush=True)

    def _bury(self, child: _Child) -> None:
        self._selector.unregister(child.pidfd)
        _, status = os.waitpid(child.pid, 0)
        with suppress(OSError):
            protocol.send(child.launcher, protocol.Ended(os.waitstatus_to_exitcode(status)))
        child.launcher.close()
        os.close(child.pidfd)

    def _refuse(self, launcher: socket.socket, why: str) -> None:
        with suppress(OSError):
            protocol.send(launcher, protocol.Answer(refusal=why))
        launcher.close()

    def _let_go(self) -> None:
        """In a forked process: what belongs to the fork server, and to other children's launchers."""
        self._selector.close()
        self._listener.close()
        for child in self._children.values():
            child.launcher.close()
            os.close(child.pidfd)
