"""The board of endpoints in a server's run directory, which the server writes and everybody else reads."""

from __future__ import annotations

import msgspec

from dynamo_local.core.errors import ConfigError, DecodeError
from dynamo_local.core.messages.endpoints import Board
from dynamo_local.core.names import parse_revision
from state.paths import StatePaths


def decode_board(data: bytes) -> Board:
    """The board in a file. Raises DecodeError for anything else."""
    try:
        board = msgspec.json.decode(data, type=Board)
        for each in board.revisions:
            parse_revision(each.revision)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ConfigError) as error:
        raise DecodeError(f"not a board of endpoints: {error}") from error
    return board


def read_board(paths: StatePaths) -> Board | None:
    """The board of the namespace's server; None if it has none, or none that can be read."""
    try:
        return decode_board(paths.board_file.read_bytes())
    except (OSError, DecodeError):
        return None
