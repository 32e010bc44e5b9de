"""The board of endpoints on disk: whole boards are read, and everything else is no board."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dynamo_local.core.errors import DecodeError
from dynamo_local.core.messages.endpoints import Board, BoardRevision
from state.endpoints.board import decode_board, read_board
from state.paths import StatePaths

BOARD = Board(7, (BoardRevision("chat@2", True, ("chat",)),))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"{",
        b'{"revisions": [{"revision": "\xff", "takes_requests": true, "served_names": []}]}',
        b'{"revisions": [{"revision": "chat", "takes_requests": true, "served_names": []}]}',
        b'{"revisions": [{"revision": "../x@1", "takes_requests": true, "served_names": []}]}',
        b'{"number": ' + b"9" * 5000 + b"}",
        b'{"other": ' + b"[" * 100_000,
    ],
)
def test_what_is_no_board_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_board(data)
    paths = StatePaths(tmp_path, "many")
    paths.run_dir.mkdir()
    paths.board_file.write_bytes(data)
    assert read_board(paths) is None


def test_a_board_cut_at_any_byte_is_no_board() -> None:
    data = msgspec.json.encode(BOARD)
    assert decode_board(data) == BOARD
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode_board(data[:length])
