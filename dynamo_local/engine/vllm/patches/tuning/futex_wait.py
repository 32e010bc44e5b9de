"""How vLLM's processes of one engine wait for each other: asleep, until the other one wakes them up.

vLLM's own way is to ask again and again for a second, and give way in between. On a CPU that happens on the core that
computes what is waited for, which each time has to wait for it; and where two processes give way to each other without
end, Linux 6.18 has been seen to let others on that core, its own workers among them, wait until the engine had nothing
to do.
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
"""A reader that is told to stop while it falls asleep sees so much later that it has been."""
_WRITER_NAP_S: Final = 1e-4
"""For a free place among those that readers have yet to read, which is rare."""


def wait_without_spinning() -> None:
    """Have vLLM's processes sleep while they wait for each other, in this process and in those forked from it.

    Where this is not known to work, vLLM's own way stays.
    """
    if platform.machine() not in FUTEX_SYSCALLS or not applies("waiting without spinning"):
        return
    from vllm.distributed.device_communicators import shm_broadcast

    module: Any = shm_broadcast
    module.SpinCondition = FutexWait
    module.sched_yield = partial(time.sleep, _WRITER_NAP_S)


class FutexWait:
    """In the place of vLLM's `SpinCondition`: tells the readers of a queue in shared memory that something was written.

    `notify_address` is that of a unix socket, "ipc://PATH", in a folder that is ours alone. There is no such socket,
    but beside its place a link to the bell, which the writer makes before any reader knows the address.
    """

    # What vLLM closes with the queue: there is no socket here.
    local_notify_socket = read_cancel_socket = write_cancel_socket = None

    def __init__(self, is_reader: bool, context: object, notify_address: str, busy_loop_s: float = 1) -> None:
        self.is_reader = is_reader
        self._bell = Bell(f"{notify_address.removeprefix('ipc://')}.bell", create=not is_reader)

    def record_read(self) -> None:
        """Something was read. vLLM's own way needs to know, this one does not."""

    def wait(self, timeout_ms: int | None = None) -> None:
        """Until something has been written since the last wait ended, or for a while: who waits looks again."""
        timeout_s = _LONGEST_WAIT_S if timeout_ms is None else min(timeout_ms / 1000, _LONGEST_WAIT_S)
        self._bell.wait(timeout_s)

    def notify(self) -> None:
        """Wake up all readers."""
        self._bell.ring()

    def cancel(self) -> None:
        """Wake up the reader, of this process, which has been told to stop."""
        if self.is_reader:
            self._bell.wake()


class Bell:
    """A count of rings that processes share, and sleep on: see futex(2). One of them rings.

    It is memory without a file. Writing to one that is mapped can take as long as its disk is busy.
    """

    def __init__(self, path: str, create: bool) -> None:
        if create:
            memory = os.memfd_create("bell")
            os.ftruncate(memory, mmap.PAGESIZE)
            # Others of this user open it through the process that has made it, and keeps it open for them.
            Path(path).symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
        else:
            memory = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.count = ctypes.c_uint32.from_buffer(mmap.mmap(memory, mmap.PAGESIZE))
        """Of rings. Begins anew after 2**32 - 1."""
        if not create:
            os.close(memory)
        self._heard = 0

    def ring(self) -> None:
        """Wake up all who wait, and those who are about to."""
        self.count.value += 1
        self.wake()

    def wake(self) -> None:
        """Wake up all who wait at this moment."""
        self._futex(_FUTEX_WAKE, _ALL, None)

    def wait(self, timeout_s: float) -> None:
        """Until it has rung since the last wait ended, it wakes us, or `timeout_s` is over."""
        if self.count.value == self._heard:
            seconds, rest = divmod(timeout_s, 1)
            self._futex(_FUTEX_WAIT, self._heard, ctypes.byref(_TimeSpec(int(seconds), int(rest * 1e9))))
        # Before what it rang for is looked at: a ring after this ends the next wait.
        self._heard = self.count.value

    def _futex(self, operation: int, value: int, timeout: Any) -> None:
        number, counted = ctypes.c_long(FUTEX_SYSCALLS[platform.machine()]), ctypes.c_uint32(value)
        if _syscall()(number, ctypes.byref(self.count), operation, counted, timeout, None, 0) < 0:
            error = ctypes.get_errno()
            # It has rung already, a signal has come, the time is over.
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
