"""Measures that make an engine cheap on a machine with few cores, all under one setting (`cpu-tuning`).

`tune_cpu_engine` applies those of an engine's processes; agents of NIXL are made within `sleeping_progress_threads`.
The modules of vLLM and torch are imported where they are changed.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.patches.forks import configure_logging_once
from dynamo_local.engine.vllm.patches.table import applies
from dynamo_local.process.ancestry import let_forks_lead_sessions

if TYPE_CHECKING:
    from dynamo_local.engine.vllm.processes import SoftBinding


def tune_cpu_engine(binding: SoftBinding | None, *, eager: bool) -> None:
    """Tune this process and those forked from it, before an engine on a CPU is forked. Imports vLLM.

    `binding` is that of the engine to its slots' cores, if it has any; `eager`: the engine compiles no model.
    """
    skip_memory_binding()
    wait_without_spinning()
    share_process_groups()
    zero_kv_at_first_use()
    configure_logging_once()
    if eager:
        disable_compilation()
    if binding is not None:
        # vLLM binds the processes that it spawns only.
        binding.bind_forks()
        start_ranks_on_their_slots()
        # Linux schedules by session: threads that compute without a pause are in another one than those that wake up
        # for moments.
        let_forks_lead_sessions()


# No binding of memory by vLLM's CPU workers on machines with a single memory node.
#
# Binding has the kernel look for pages on other nodes, of which there are none, and for that it waits until each core
# has done some work of its own. On a core whose engine decodes without a pause that has taken minutes, during which the
# new worker served nothing.


def skip_memory_binding() -> None:
    """Leave memory unbound where there is one memory node only, in this process and in those forked from it."""
    if not applies("leaving memory where it is"):
        return
    import torch
    from vllm.utils.cpu_resource_utils import get_memory_affinity

    if len(get_memory_affinity()) == 1:
        operations: Any = torch.ops._C
        operations.init_cpu_memory_env = lambda nodes: None


# Processes of one engine sleep while they wait for each other, until the other one wakes them up.
#
# vLLM's own processes poll for a second, and yield the core in between. On a CPU they poll on the core that computes
# what they wait for, and delay it each time. Where two processes yield to each other without end, Linux 6.18 has let
# other threads of that core, the kernel's own among them, wait until the engine had nothing to do.

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


# A single process group, without a thread, in an engine that has only one worker.
#
# vLLM makes two groups for each kind of parallelism, and each has a thread.

_GLOO = "gloo"


def share_process_groups() -> None:
    """Have PyTorch make one group where there is one process only, in this process and in those forked from it.

    vLLM makes a dozen, of a process that has no other one to talk to. Each has a thread that wakes up a hundred times a
    second (https://github.com/pytorch/gloo/issues/246), on the core that computes: 1,284 times for a worker that has
    nothing to do, and as often as all else of one that decodes.
    """
    if not applies("one process group for a lone worker"):
        return
    import torch

    distributed: Any = torch.distributed
    distributed.init_process_group = partial(_init_group, distributed, distributed.init_process_group)
    distributed.new_group = partial(_new_group, distributed, distributed.new_group)
    distributed.destroy_process_group = partial(_destroy_group, distributed, distributed.destroy_process_group)


def _init_group(
    distributed: Any,
    make: Callable[..., None],
    backend: str | None = None,
    *args: Any,
    world_size: int = -1,
    **options: Any,
) -> None:
    if world_size == 1 and backend == _GLOO and _has_backend_without_thread():
        backend = distributed.Backend.FAKE
    make(backend, *args, world_size=world_size, **options)


def _has_backend_without_thread() -> bool:
    """Whether PyTorch has the backend that its own tests use, which talks to nobody: right for a single process. It is
    no documented interface; without it gloo is used."""
    try:
        # Makes the backend known.
        import torch.testing._internal.distributed.fake_pg  # noqa: F401
    except ImportError:
        return False
    return True


def _new_group(
    distributed: Any, make: Callable[..., Any], *args: Any, backend: str | None = None, **options: Any
) -> Any:
    if distributed.get_world_size() == 1 and backend in (None, *_names_of_world(distributed)):
        return distributed.group.WORLD
    return make(*args, backend=backend, **options)


def _names_of_world(distributed: Any) -> tuple[str, ...]:
    """Names of the backend that the group has, and of the one that was asked for."""
    has: str = distributed.get_backend()
    return (has, _GLOO) if has == distributed.Backend.FAKE else (has,)


def _destroy_group(distributed: Any, destroy: Callable[..., None], group: Any = None) -> None:
    # The last destruction names no group. Until then the group is in use under other names, too.
    if group is None or group is not distributed.group.WORLD:
        destroy(group)


# The KV cache of an engine on a CPU is memory that the kernel zeroes at its first use.
#
# vLLM writes zeros over all of it when the engine starts, a second and more for each GiB, most of a small model's
# start. Memory of an anonymous mapping is zero by itself: its pages are made when a block is written for the first
# time.

_LARGE = 2**20
"""Bytes from which a mapping of its own is worth its cost."""

_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""Mappings of the KV cache that this process has made. Their tensors keep them."""


def zero_kv_at_first_use() -> None:
    """Have engines on a CPU map their KV cache, in this process and in those forked from it."""
    if not applies("KV memory zeroed at first use"):
        return
    import torch
    from vllm.v1.worker import utils

    changed: Any = utils
    changed.torch = _Torch(torch)


def give_back_kv() -> int:
    """Give the pages of this process' KV cache back to the system: it is zero again, and its pages are made anew at
    their next use. Returns its size in bytes."""
    for memory in _mappings:
        memory.madvise(mmap.MADV_DONTNEED)
    return sum(map(len, _mappings))


class _Torch:
    """Stand in for the module `torch` where vLLM allocates the KV cache: all of it as it is, except one function."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, *size: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        """Return a tensor of zeros: for many bytes on a CPU, one whose memory has not been touched."""
        on_cpu = device is not None and self._torch.device(device).type == "cpu"
        (length, *more) = size
        if options or more or dtype is not self._torch.int8 or not on_cpu or not isinstance(length, int):
            return self._torch.zeros(*size, dtype=dtype, device=device, **options)
        if length < _LARGE:
            return self._torch.zeros(length, dtype=dtype, device=device)
        # The tensor keeps the mapping.
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _mappings.add(memory)
        return self._torch.frombuffer(memory, dtype=dtype, count=length)


# No compilation by PyTorch in engines that are told to be eager.
#
# vLLM marks some helpers to be compiled at their first use, even where `enforce-eager` is set: on a CPU, the first
# request for log-probabilities would stop its worker for ten seconds and more.


def disable_compilation() -> None:
    """Run what is marked for compilation uncompiled, in this process and in those forked from it."""
    if not applies("compiling nothing"):
        return
    from torch._dynamo import config

    config.disable = True


# Ranks of a forked engine start on the cores of their slots.
#
# vLLM tells the OpenMP of a spawned worker its cores. The OpenMP of a forked worker has read its settings before the
# fork, so the process itself is bound while the worker starts.


def start_ranks_on_their_slots() -> None:
    """Start each of vLLM's workers on its rank's cores, in this process and in those forked from it."""
    if not applies("ranks on their slots"):
        return
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    manager: Any = OMPProcessManager
    original = manager.configure_omp_envs

    @contextmanager
    def configure(self: Any, rank: int, local_rank: int) -> Iterator[None]:
        before = os.sched_getaffinity(0)
        if self.cpu_lists:
            os.sched_setaffinity(0, self.cpu_lists[local_rank])
        try:
            with original(self, rank, local_rank):
                yield
        finally:
            os.sched_setaffinity(0, before)

    manager.configure_omp_envs = configure


# NIXL agents whose progress thread sleeps while there is nothing to do.
#
# NIXL's Python package makes every agent's progress thread poll without a pause, and has no parameter for it: each
# engine would keep one core busy for as long as it lives, idle or not. (On a machine with two cores, decode steps
# became several times longer.) A thread is needed all the same: without it, an idle engine could not be connected to.

PROGRESS_TIMEOUT_US = 100_000
"""The longest sleep of the thread. Events wake it earlier (poll(2)); with each wake-up it goes through all connections
of the engine's process, and waking up every 5 ms cost 0.8 % of a core."""


@contextmanager
def sleeping_progress_threads() -> Iterator[None]:
    """Give agents that are made within such a thread."""
    if not applies("NIXL's progress threads"):
        yield
        return
    api: Any = importlib.import_module("nixl._api")
    original = api.nixlBind
    api.nixlBind = _Bindings(original)
    try:
        yield
    finally:
        api.nixlBind = original


class _Bindings:
    """Stand in for NIXL's bindings: all of them as they are, except one function."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802  # NIXL's name
        config.pthrDelay = PROGRESS_TIMEOUT_US
        # vLLM makes connections in a thread of its own.
        config.syncMode = self._original.NIXL_THREAD_SYNC_STRICT
        return self._original.nixlAgent(name, config)
