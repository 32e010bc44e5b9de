"""Reads of KV in a thread of their own, beside the one in which the engine's steps run.

NIXL's agent says that posting a read is asynchronous, and on GPUs it is. In ordinary memory the call that posts a read
copies all of it (agents.py). So the steps make none while anything is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from dynamo_local.core.errors import EngineError

_LOOK_EVERY_S = 0.001
"""Interval of looks at reads that have been posted and have not ended."""

_END_S = 2.0
"""Time for a copy under way to end when the process ends."""


@dataclass(eq=False)
class Read:
    """Stand in for NIXL's handle of a transfer."""

    blocks: tuple[Any, ...]
    """Arguments of `make_prepped_xfer`."""
    handle: Any = None
    """NIXL's handle, from when the read is posted until it has succeeded."""
    unwanted: bool = False
    done: bool = False
    error: Exception | None = None


class ReaderThread:
    """Agent, NIXL's or ours, whose `transfer` only says what is to be transferred, and whose `check_xfer_state` only
    looks.

    `prepare` is called in the thread before every read. The thread starts with the first one.
    """

    def __init__(self, agent: Any, prepare: Callable[[], None]) -> None:
        self._agent = agent
        self._prepare = prepare
        self._queue: SimpleQueue[Read | None] = SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(self, *blocks: Any, notif_msg: bytes = b"") -> Read:
        """Make a read. No process is notified: the source holds nothing in the name of a request."""
        return Read(blocks)

    def transfer(self, read: Read) -> str:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
            self._thread.start()
        self._queue.put(read)
        return "PROC"

    def check_xfer_state(self, read: Read) -> str:
        """Raises what NIXL raised."""
        if read.error is not None:
            raise read.error
        return "DONE" if read.done else "PROC"

    def get_xfer_telemetry(self, read: Read) -> None:
        """Return nothing: telemetry is not used."""

    def release_xfer_handle(self, read: Read) -> None:
        """Raises what NIXL does if the transfer has not ended and cannot be taken back."""
        read.unwanted = True
        if read.handle is not None:
            self._agent.release_xfer_handle(read.handle)

    def give_up(self, reads: Iterable[Any]) -> None:
        """Keep reads from being posted that are not yet. They end soon."""
        for read in reads:
            read.unwanted = True

    def wait(self, timeout_s: float) -> None:
        """Wait until a read has ended since the last call, for `timeout_s` at most."""
        self._ended.wait(timeout_s)
        self._ended.clear()

    def close(self) -> None:
        """Post no further read, and wait for the copy under way."""
        self._closing = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_END_S)

    def _run(self) -> None:
        posted: list[Read] = []
        while True:
            try:
                read = self._queue.get(timeout=_LOOK_EVERY_S if posted else None)
            except Empty:
                pass
            else:
                if read is None or self._closing:
                    return
                posted.append(read)
            posted = [read for read in posted if not self._ends(read)]

    def _ends(self, read: Read) -> bool:
        """Post it if it is new, and look whether it has ended."""
        try:
            state = self._post(read) if read.handle is None else self._agent.check_xfer_state(read.handle)
            if state == "PROC":
                return False
            if state != "DONE":
                raise EngineError("NIXL says that the read has failed")
            if read.handle is not None:
                self._agent.release_xfer_handle(read.handle)
                read.handle = None
            read.done = True
        except Exception as error:  # noqa: BLE001  # check_xfer_state raises it
            read.error = error
        self._ended.set()
        return True

    def _post(self, read: Read) -> str:
        if read.unwanted:
            return "DONE"
        self._prepare()
        read.handle = self._agent.make_prepped_xfer(*read.blocks)
        state: str = self._agent.transfer(read.handle)
        return state
