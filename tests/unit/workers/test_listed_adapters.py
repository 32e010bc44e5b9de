"""The adapters of an endpoint, as its workers read them from the board."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from components.workers.listed_adapters import BoardAdapters
from dynamo_local.core.messages.endpoints import Board, BoardRevision, ServedAdapter
from state.files import replace_file


def write(path: Path, number: int, **adapters: dict[str, str]) -> None:
    """A board with these revisions, each with adapters: folders by name."""
    revisions = tuple(
        BoardRevision(
            revision.replace("_", "@"), True, (), tuple(ServedAdapter(name, folder) for name, folder in listed.items())
        )
        for revision, listed in adapters.items()
    )
    replace_file(path, msgspec.json.encode(Board(number, revisions)), durable=False)


@pytest.fixture
def board(tmp_path: Path) -> Path:
    return tmp_path / "board.json"


def test_only_those_of_the_revision_are_read(board: Path) -> None:
    write(board, 1, chat_1={"pirate": "/one"}, chat_2={"robot": "/two"})
    assert BoardAdapters(board, "chat@2")()[1] == {"robot": "/two"}
    assert BoardAdapters(board, "chat@3")()[1] == {}


def test_each_change_of_the_board_is_another_version(board: Path) -> None:
    adapters = BoardAdapters(board, "chat@1")
    write(board, 1, chat_1={"pirate": "/one"})
    first = adapters()
    assert adapters() == first
    write(board, 2, chat_1={"pirate": "/two"})
    second = adapters()
    assert second[1] == {"pirate": "/two"}
    assert second[0] != first[0]


def test_a_board_that_cannot_be_read_changes_nothing(board: Path) -> None:
    adapters = BoardAdapters(board, "chat@1")
    assert adapters()[1] == {}
    write(board, 1, chat_1={"pirate": "/one"})
    found = adapters()
    board.write_bytes(b"{")
    assert adapters() == found
    board.unlink()
    assert adapters() == found
    write(board, 2, chat_1={})
    assert adapters()[1] == {}
