"""The LoRA adapters of a worker's endpoint, as the board lists them: a file that the server writes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from dynamo_local.core.errors import DecodeError
from dynamo_local.log_once import LogOnce
from state.endpoints.board import decode_board

_log = logging.getLogger(__name__)


class BoardAdapters:
    """Callable that returns the adapters of one revision now: folders by `ServedAdapter.key`, and a version that
    differs after each change of them. A board that cannot be read is as if it had not changed."""

    def __init__(self, board: Path, revision: str) -> None:
        self._board = board
        self._revision = revision
        self._read_at: tuple[int, ...] = ()
        self._folders: Mapping[str, str] = {}
        self._version = 0
        self._log_once = LogOnce(_log)

    def __call__(self) -> tuple[int, Mapping[str, str]]:
        # A look at the file's status, for each request with an adapter; it is read after a change.
        try:
            status = self._board.stat()
            now = (status.st_mtime_ns, status.st_ino, status.st_size)
            if now != self._read_at:
                self._take(self._read())
                self._read_at = now
        except (OSError, DecodeError) as error:
            self._log_once.warn(f"the board of endpoints cannot be read, the last one holds: {error}")
        else:
            self._log_once.clear()
        return self._version, self._folders

    def _take(self, folders: Mapping[str, str]) -> None:
        if folders != self._folders:
            self._folders = folders
            self._version += 1

    def _read(self) -> dict[str, str]:
        board = decode_board(self._board.read_bytes())
        listed = (entry for entry in board.revisions if entry.revision == self._revision)
        return {adapter.key: adapter.path for entry in listed for adapter in entry.adapters}
