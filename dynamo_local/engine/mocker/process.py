"""A process that a mocker depends on, as vLLM does on its engine core. Tests kill or stop it."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable

from dynamo_local.core.errors import EngineError

_ECHO = "cat"
"""Ends when its input does, and so with the process that has started it."""


class EngineProcess:
    """Process that does nothing but answer. `on_end` is called when it has died."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._process: Process | None = None
        self._waiting: asyncio.Task[int] | None = None

    @property
    def dead(self) -> bool:
        return self._waiting is not None and self._waiting.done()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(_ECHO, stdin=PIPE, stdout=PIPE)
        self._waiting = asyncio.create_task(self._process.wait(), name="mocker's process")
        self._waiting.add_done_callback(lambda _: self._on_end())

    async def answer(self) -> None:
        """Wait until the process has answered: for ever, if it is stopped. Raises EngineError if it is dead."""
        assert self._process is not None, "it was started"
        there, back = self._process.stdin, self._process.stdout
        assert there is not None, "it was started with pipes"
        assert back is not None, "it was started with pipes"
        try:
            there.write(b".")
            await there.drain()
            await back.readexactly(1)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise process_died() from error

    async def end(self) -> None:
        """Kill it, and wait for its end."""
        if self._process is not None and not self.dead:
            self._process.kill()
        if self._waiting is not None:
            await self._waiting


def process_died() -> EngineError:
    return EngineError("the mocker's process died")
