"""Follows the board of endpoints: the file that the server writes for its frontends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.subscriptions import Message
from dynamo_local.core.errors import DecodeError
from dynamo_local.core.messages.endpoints import Board
from dynamo_local.core.subjects import Subjects
from dynamo_local.log_once import LogOnce
from state.endpoints.board import decode_board

_log = logging.getLogger(__name__)

POLL_S = 2.0
"""Between two looks at the file. The server tells of each change as well, which may be lost."""


class BoardWatch:
    """Calls `on_board` with the board whenever it has changed. A board that cannot be read is as if it had not."""

    def __init__(
        self, path: Path, bus: Bus, subjects: Subjects, on_board: Callable[[Board], None], *, poll_s: float = POLL_S
    ) -> None:
        self._path = path
        self._bus = bus
        self._subject = subjects.board
        self._on_board = on_board
        self._poll_s = poll_s
        self._told = asyncio.Event()
        self._last: bytes | None = None
        self._log_once = LogOnce(_log)

    async def start(self) -> None:
        """Read the board if there is one, and listen to changes."""

        async def on_change(_: Message) -> None:
            self._told.set()

        await self._bus.subscribe(self._subject, on_change)
        self._read()

    async def run(self) -> None:
        """Follow the board until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._told.wait()
            except TimeoutError:
                pass
            self._told.clear()
            self._read()

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._log_once.warn(f"the board of endpoints cannot be read, the last one holds: {error}")
            return
        if data == self._last:
            return
        try:
            board = decode_board(data)
        except DecodeError as error:
            self._log_once.warn(f"the board of endpoints is damaged, the last one holds: {error}")
            return
        self._log_once.clear()
        self._last = data
        self._on_board(board)
