"""The LoRA adapters of a worker's endpoint, as the board lists them: a file that the server writes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from dynamo_local.core.errors import DecodeError
from dynamo_local.log_once import LogOnce
from state.board import decode_board

_log = logging.getLogger(__name__)


class BoardAdapters:
    """Callable that returns the adapters of one revision now, by name, and a version that differs after each change of
    the board. A board that cannot be read is as if it had not changed."""

    def __init__(self, board: Path, revision: str) -> None:
        self._board = board
        self._revision = revision
        self._version: tuple[int, ...] = ()
        self._folders: Mapping[str, str] = {}
        self._log_once = LogOnce(_log)

    def __call__(self) -> tuple[tuple[int, ...], Mapping[str, str]]:
        # A look at the file's status, for each request with an adapter; it is read after a change.
        try:
            status = self._board.stat()
            version = (status.st_mtime_ns, status.st_ino, status.st_size)
            if version != self._version:
                self._folders = self._read()
                self._version = version
        except (OSError, DecodeError) as error:
            self._log_once.warn(f"the board of endpoints cannot be read, the last one holds: {error}")
        else:
            self._log_once.clear()
        return self._version, self._folders

    def _read(self) -> dict[str, str]:
        board = decode_board(self._board.read_bytes())
        listed = (entry for entry in board.revisions if entry.revision == self._revision)
        return {adapter.name: adapter.path for entry in listed for adapter in entry.adapters}
