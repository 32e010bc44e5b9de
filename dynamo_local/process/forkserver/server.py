"""The loop of the fork server: forks a process for each order. It has one thread, as forking copies no other.

A prepared process (prepared) has the same loop, and so has the spare (spare.py). Each has a socket of its own.
"""

from __future__ import annotations

import os
import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass

from dynamo_local.core.errors import DecodeError, StateError
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.preload import Preloaded
from dynamo_local.process.forkserver.prepared.manager import PreparedProcesses
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder
from dynamo_local.process.forkserver.spare import SpareKeeper, SpareOrder
from state.paths import StatePaths

_ORDER_DEADLINE_S = 2.0
"""For a launcher to send its order, which it does at once."""


@dataclass(frozen=True)
class AcceptedOrder:
    """The order that a forked process is to carry out. `descriptors`: see protocol.py."""

    order: protocol.Order
    descriptors: tuple[int, ...]


@dataclass(frozen=True)
class _Child:
    pid: int
    pidfd: int
    launcher: socket.socket


class ForkServer:
    """A listening socket, and for each living child the connection to its launcher."""

    def __init__(self, listener: socket.socket, preloaded: Preloaded) -> None:
        self._listener = listener
        self._preloaded = preloaded
        self._children: dict[int, _Child] = {}
        self._prepared: PreparedProcesses | None = None
        self._spare: SpareKeeper | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def prepare(self, paths: StatePaths) -> None:
        """Make prepared processes from now on, as they are ordered."""
        try:
            self._prepared = PreparedProcesses(paths, self._selector)
        except (OSError, StateError) as error:
            print(f"warning: no process with loaded weights will be made: {error}", flush=True)

    def keep_spare(self, pid: int | None) -> None:
        """Make a spare from now on whenever there is none. `pid`: of the one there is, or was just now."""
        self._spare = SpareKeeper(self._selector, pid)

    def run(self) -> AcceptedOrder | PreparedOrder | SpareOrder:
        """Fork for ever. Returns in forked processes only, where the fork server's descriptors are closed: what the
        process is to do."""
        while True:
            for key, _ in self._selector.select(self._pause_s()):
                if key.fileobj is not self._listener:
                    self._notice(key.fd)
                elif (accepted := self._accept()) is not None:
                    return accepted
            if self._prepared is not None and (ordered := self._fork_prepared(self._prepared)) is not None:
                return ordered
            if (
                self._spare is not None
                and self._spare.is_due()
                and (spare := self._fork_spare(self._spare)) is not None
            ):
                return spare

    def _pause_s(self) -> float | None:
        keepers = (keeper for keeper in (self._prepared, self._spare) if keeper is not None)
        return min((pause_s for keeper in keepers if (pause_s := keeper.pause_s()) is not None), default=None)

    def _notice(self, descriptor: int) -> None:
        child = self._children.pop(descriptor, None)
        if child is not None:
            self._reap(child)
            return
        for keeper in (self._prepared, self._spare):
            if keeper is not None:
                keeper.notice(descriptor)

    def _fork_prepared(self, prepared: PreparedProcesses) -> PreparedOrder | None:
        ordered = prepared.next()
        if ordered is None:
            return None
        pid = self._fork_own()
        if pid == 0:
            return ordered
        if isinstance(pid, str):
            prepared.not_made(ordered, pid)
        else:
            prepared.made(ordered, pid)
        return None

    def _fork_spare(self, spare: SpareKeeper) -> SpareOrder | None:
        pid = self._fork_own()
        if pid == 0:
            return SpareOrder()
        if isinstance(pid, str):
            spare.not_made(pid)
        else:
            spare.made(pid)
        return None

    def _fork_own(self) -> int | str:
        """Fork a process that no launcher has asked for. Returns as os.fork, or why it cannot be."""
        why_not = self._preloaded.unfit()
        if why_not is not None:
            return why_not
        try:
            pid = os.fork()
        except OSError as error:
            return f"the system does not let it: {error.strerror}"
        if pid == 0:
            self._close_in_child()
        return pid

    def _accept(self) -> AcceptedOrder | None:
        launcher, _ = self._listener.accept()
        launcher.settimeout(_ORDER_DEADLINE_S)
        try:
            order, descriptors = protocol.receive(launcher, protocol.Order, protocol.FORKED_DESCRIPTORS)
        except (OSError, DecodeError) as error:
            # The launcher has ended meanwhile, or the client is no launcher.
            print(f"warning: an order was not understood: {error}", flush=True)
            launcher.close()
            return None
        objection = self._preloaded.objection(order.environ, order.cwd)
        if len(descriptors) != protocol.FORKED_DESCRIPTORS:
            objection = f"{len(descriptors)} descriptors came with the order"
        if objection is None:
            return self._fork(launcher, AcceptedOrder(order, tuple(descriptors)))
        protocol.close(descriptors)
        self._refuse(launcher, objection)
        return None

    def _fork(self, launcher: socket.socket, accepted: AcceptedOrder) -> AcceptedOrder | None:
        try:
            pid = os.fork()
        except OSError as error:
            self._refuse(launcher, f"the system does not let it: {error.strerror}")
        else:
            if pid == 0:
                launcher.close()
                self._close_in_child()
                return accepted
            self._add_child(pid, launcher)
        protocol.close(accepted.descriptors)
        return None

    def _add_child(self, pid: int, launcher: socket.socket) -> None:
        child = _Child(pid, os.pidfd_open(pid), launcher)
        self._children[child.pidfd] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ)
        # If the launcher is gone, the death pipe kills the child.
        with suppress(OSError):
            protocol.send(launcher, protocol.Answer(pid), (child.pidfd,))
        print(f"forked {pid}", flush=True)

    def _reap(self, child: _Child) -> None:
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

    def _close_in_child(self) -> None:
        """Close, in a forked process, the descriptors of the fork server and of other children's launchers."""
        self._selector.close()
        self._listener.close()
        for keeper in (self._prepared, self._spare):
            if keeper is not None:
                keeper.close()
        for child in self._children.values():
            child.launcher.close()
            os.close(child.pidfd)
