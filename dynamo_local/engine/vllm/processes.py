"""The processes of an engine, watched by the worker's host: the death of any one is the death of the engine.

vLLM notices these as well. But where several workers share a model, it waits for those that are left, which wait for
the dead one, up to 9 s before it tells.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies
from dynamo_local.process.groups import children_of

_WORKER = b"::Worker"
"""Part of the title of a worker's process of vLLM. (An engine core has other children, too, which come and go.)"""


class EngineProcesses:
    """Watched processes. `on_end` is called when one has ended, unless `close` comes first. Needs a running loop."""

    def __init__(self, pids: Iterable[int], on_end: Callable[[], None]) -> None:
        self.pids = tuple(pids)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._descriptors: list[int] = []
        for pid in self.pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(on_end)
                continue
            self._descriptors.append(descriptor)
            self._loop.add_reader(descriptor, self._ended)

    async def kill(self, deadline_s: float) -> None:
        """Kill the processes, and wait until they are gone with what they hold. Their children are spared: resource
        trackers among them remove the shared memory of killed processes."""
        self.forget()
        for descriptor in self._descriptors:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                for descriptor in self._descriptors:
                    await self._gone(descriptor)

    def close(self) -> None:
        """Stop watching, and close the descriptors."""
        self.forget()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def forget(self) -> None:
        """Stop watching: `on_end` is not called any more."""
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)

    def _ended(self) -> None:
        self.forget()
        self._on_end()

    async def _gone(self, descriptor: int) -> None:
        ended = asyncio.Event()
        self._loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            self._loop.remove_reader(descriptor)


def watch_processes(core: Any) -> EngineProcesses | None:
    """Watch the engine core of a client of vLLM's, and its workers. When one has ended, the client behaves as if vLLM
    had noticed. None: processes of this version of vLLM cannot be watched, and vLLM notices by itself."""
    if not applies("watching the engine's processes"):
        return None
    from vllm.v1.engine.exceptions import EngineDeadError

    def tell() -> None:
        core.resources.engine_dead = True
        core.outputs_queue.put_nowait(EngineDeadError())

    cores = [process.pid for process in core.resources.engine_manager.processes]
    workers = [pid for parent in cores for pid in children_of(parent) if _WORKER in _title(pid)]
    return EngineProcesses(cores + workers, tell)


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
