"""Processes of one engine sleep while they wait for each other, until the other one wakes them up.

vLLM's own processes poll for a second, and yield the core in between. On a CPU they poll on the core that computes what
they wait for, and delay it each time. Where two processes yield to each other without end, Linux 6.18 has let other
threads of that core, the kernel's own among them, wait until the engine had nothing to do.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.patches.check import applies

FUTEX_SYSCALLS: Final[Mapping[str, int]] = {
    "aarch64": 98,
    "ppc64le": 221,
    "riscv64": 98,
    "s390x": 238,
    "x86_64": 202,
}
"""Numbers of futex(2), by machine. The C library has no function for it."""
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_ALL: Final = 2**31 - 1

_LONGEST_WAIT_S: Final = 0.25
"""Longest sleep. A reader that is told to stop while it falls asleep notices after so long."""
_WRITER_NAP_S: Final = 1e-4
"""Sleep of a writer that finds the queue full, which is rare."""


def wait_without_spinning() -> None:
    """Replace vLLM's waiting in this process and in those forked from it, where the number of futex(2) is known."""
    if platform.machine() not in FUTEX_SYSCALLS or not applies("waiting without spinning"):
        return
    from vllm.distributed.device_communicators import shm_broadcast

    module: Any = shm_broadcast
    module.SpinCondition = FutexWait
    module.sched_yield = partial(time.sleep, _WRITER_NAP_S)


class FutexWait:
    """Stand in for vLLM's `SpinCondition`: tells the readers of a queue in shared memory that something was written.

    `notify_address` is that of a unix socket, "ipc://PATH", in a folder that is ours alone. There is no such socket,
    but beside its place a link to the event, which the writer makes before any reader knows the address.
    """

    # vLLM closes these sockets with the queue. There are none here.
    local_notify_socket = read_cancel_socket = write_cancel_socket = None

    def __init__(self, is_reader: bool, context: object, notify_address: str, busy_loop_s: float = 1) -> None:
        self.is_reader = is_reader
        self._event = FutexEvent(f"{notify_address.removeprefix('ipc://')}.futex", create=not is_reader)

    def record_read(self) -> None:
        """Do nothing: vLLM's condition needs to know that something was read, this one does not."""

    def wait(self, timeout_ms: int | None = None) -> None:
        """Wait until something has been written since the last wait ended, or for a while: the caller looks again."""
        timeout_s = _LONGEST_WAIT_S if timeout_ms is None else min(timeout_ms / 1000, _LONGEST_WAIT_S)
        self._event.wait(timeout_s)

    def notify(self) -> None:
        """Wake up all readers."""
        self._event.notify()

    def cancel(self) -> None:
        """Wake up this process' reader, which has been told to stop."""
        if self.is_reader:
            self._event.wake()


class FutexEvent:
    """Count of notices that processes share, and sleep on: see futex(2). One of them notifies.

    The count is in memory without a file: writing to a mapped file can take as long as its disk is busy.
    """

    def __init__(self, path: str, create: bool) -> None:
        if create:
            memory = os.memfd_create("futex")
            os.ftruncate(memory, mmap.PAGESIZE)
            # Processes of this user open it through this one, which keeps it open for them.
            Path(path).symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
        else:
            memory = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.count = ctypes.c_uint32.from_buffer(mmap.mmap(memory, mmap.PAGESIZE))
        """Number of notices. Begins anew after 2**32 - 1."""
        if not create:
            os.close(memory)
        self._seen = 0

    def notify(self) -> None:
        """Wake up all processes that wait, and those that are about to."""
        self.count.value += 1
        self.wake()

    def wake(self) -> None:
        """Wake up all processes that wait at this moment."""
        self._futex(_FUTEX_WAKE, _ALL, None)

    def wait(self, timeout_s: float) -> None:
        """Wait for a notice since the last wait ended, for a call of `wake`, or for `timeout_s`."""
        if self.count.value == self._seen:
            seconds, rest = divmod(timeout_s, 1)
            self._futex(_FUTEX_WAIT, self._seen, ctypes.byref(_TimeSpec(int(seconds), int(rest * 1e9))))
        # Before the caller looks at what the notice is of: a later notice ends the next wait.
        self._seen = self.count.value

    def _futex(self, operation: int, value: int, timeout: Any) -> None:
        number, counted = ctypes.c_long(FUTEX_SYSCALLS[platform.machine()]), ctypes.c_uint32(value)
        if _syscall()(number, ctypes.byref(self.count), operation, counted, timeout, None, 0) < 0:
            error = ctypes.get_errno()
            # Notified already, interrupted by a signal, timed out.
            if error not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise EngineError(
                    f"processes of the engine cannot wait for each other: {os.strerror(error)}",
                    "see whether futex(2) is allowed here",
                )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _syscall() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function
