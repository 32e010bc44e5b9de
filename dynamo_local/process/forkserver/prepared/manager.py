"""Makes and ends prepared processes, in the fork server: as the orders say, and again when one has died."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.names import Watcher
from dynamo_local.core.process.restarts import Attempts, ended, given_up, is_ready, missing_bytes, next_step, reordered
from dynamo_local.core.sizing.machine import size
from dynamo_local.process.forkserver.prepared.orders import Found, PreparedOrder, link_sockets, read_orders
from state.files import make_private_directory
from state.machine.memory import machine_memory
from state.paths import StatePaths


@dataclass(frozen=True)
class _Running:
    pid: int
    pidfd: int


class PreparedProcesses:
    """The prepared processes of one fork server, whose selector tells what happens to them."""

    def __init__(self, paths: StatePaths, selector: selectors.BaseSelector) -> None:
        """Raises OSError or StateError if changes of the orders cannot be noticed."""
        self._paths = paths
        self._selector = selector
        self._watch = FolderWatch(make_private_directory(paths.prepared_dir))
        selector.register(self._watch.descriptor, selectors.EVENT_READ)
        self._running: dict[str, _Running] = {}
        self._attempts: dict[str, Attempts] = {}
        self._orders: Mapping[Watcher, Found] = {}
        self._read = False
        self._look_at: float | None = None

    def pause_s(self) -> float | None:
        """How long nothing is to be done unless something happens; None: no end."""
        if not self._read:
            return 0.0
        return None if self._look_at is None else max(self._look_at - time.monotonic(), 0.0)

    def notice(self, descriptor: int) -> None:
        """Take note of a descriptor of the selector that is ready, if it is one of these."""
        if descriptor == self._watch.descriptor:
            self._watch.clear()
            self._read = False
        for key, running in list(self._running.items()):
            if running.pidfd == descriptor:
                self._reap(key, running)

    def next(self) -> PreparedOrder | None:
        """End what nobody wants any more. Returns the order of a process to be forked now, if there is one."""
        now = time.monotonic()
        if not self._read:
            self._read_orders(now)
        orders = {found.order.key: found.order for found in self._orders.values()}
        step = next_step(orders, self._running, self._attempts, now)
        self._look_at = step.look_at
        for key in step.end:
            # Workers that were forked from it live on.
            signal.pidfd_send_signal(self._running[key].pidfd, signal.SIGKILL)
        if step.make is None or not self._has_room(orders[step.make]):
            return None
        return orders[step.make]

    def made(self, order: PreparedOrder, pid: int) -> None:
        """Take note of a process that was forked."""
        running = self._running[order.key] = _Running(pid, os.pidfd_open(pid))
        self._selector.register(running.pidfd, selectors.EVENT_READ)
        print(f"forked {pid}, which loads weights (key {order.key})", flush=True)

    def not_made(self, order: PreparedOrder, why: str) -> None:
        """Take note of a process that could not be forked."""
        print(f"warning: no process with loaded weights is made: {why}", flush=True)
        self._attempts[order.key] = given_up(self._attempts[order.key])

    def close(self) -> None:
        """Close the descriptors, in a forked process."""
        self._watch.close()
        for running in self._running.values():
            os.close(running.pidfd)

    def _read_orders(self, now: float) -> None:
        self._read = True
        self._orders = read_orders(self._paths)
        numbers: dict[str, int] = {}
        for found in self._orders.values():
            numbers[found.order.key] = max(found.number, numbers.get(found.order.key, 0))
        self._attempts = {key: reordered(self._attempts.get(key), number) for key, number in numbers.items()}
        for key in self._running:
            if key in self._attempts and self._paths.prepared_socket(key).exists():
                self._attempts[key] = is_ready(self._attempts[key], now)
        with suppress(OSError):
            # The run directory may have been removed.
            link_sockets(self._paths, {watcher: found.order.key for watcher, found in self._orders.items()})

    def _has_room(self, order: PreparedOrder) -> bool:
        memory = machine_memory()
        free = None if memory is None else memory.free
        missing = missing_bytes(free, order.weight_bytes, order.keep_free_bytes)
        if missing:
            self.not_made(
                order, f"{size(missing)} more of free memory would be needed; workers load weights themselves"
            )
        return missing == 0

    def _reap(self, key: str, running: _Running) -> None:
        del self._running[key]
        self._selector.unregister(running.pidfd)
        os.close(running.pidfd)
        _, status = os.waitpid(running.pid, 0)
        with suppress(OSError):
            self._paths.prepared_socket(key).unlink(missing_ok=True)
        if key in self._attempts:
            code = os.waitstatus_to_exitcode(status)
            self._attempts[key] = ended(self._attempts[key], code, time.monotonic())
            print(f"warning: {running.pid}, a process with loaded weights, has ended (status {code})", flush=True)
        else:
            print(f"{running.pid} has ended: no worker needs its weights any more", flush=True)


# Tells by a descriptor that the files of a folder have changed (inotify): nobody needs to look again and again.

_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x40, 0x80, 0x100, 0x200
_EVENTS = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE

_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """`descriptor` can be read after files of the folder were made, renamed or removed, or the folder itself."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError: the folder is not there, or this user watches too many."""
        # Both flags have the values of open's.
        self.descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            _checked(_libc.inotify_add_watch(self.descriptor, os.fsencode(folder), _EVENTS))
        except OSError:
            self.close()
            raise

    def clear(self) -> None:
        """Have the descriptor be readable again only after the next change."""
        with suppress(BlockingIOError):
            while os.read(self.descriptor, 64 * 1024):
                pass

    def close(self) -> None:
        os.close(self.descriptor)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
