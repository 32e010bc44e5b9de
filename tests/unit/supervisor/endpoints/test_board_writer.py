"""The file of the board: written when something has changed, and when nobody else has left it as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.errors import StateError
from dynamo_local.core.messages.endpoints import BoardRevision, EndpointStatus, EndpointView
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.endpoints.board import BoardWriter
from state.endpoints.board import decode_board
from tests.unit.supervisor.recording import RecordingReport


class SilentBus:
    def __init__(self) -> None:
        self.nudges = 0

    async def publish(self, subject: str, data: bytes) -> None:
        self.nudges += 1


def writer(path: Path, bus: SilentBus) -> BoardWriter:
    revisions = (BoardRevision("chat@1", True, ("chat",)),)
    return BoardWriter(
        path, cast("Any", bus), Subjects("many"), lambda: (revisions, ()), RecordingReport(), lambda _: None
    )


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"number": 1, "revisions": [', b"\xff"])
def test_a_board_that_was_damaged_is_written_anew(tmp_path: Path, damage: bytes) -> None:
    async def scenario() -> None:
        bus = SilentBus()
        board = writer(tmp_path / "run" / "board.json", bus)
        await board.publish()
        await board.publish()
        assert bus.nudges == 1, "nothing has changed"
        whole = decode_board(board.path.read_bytes()).revisions
        for harm in (lambda: board.path.write_bytes(damage), board.path.unlink):
            harm()
            await board.publish()
            assert decode_board(board.path.read_bytes()).revisions == whole
        assert bus.nudges == 3

    asyncio.run(scenario())


def test_a_board_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        bus = SilentBus()
        (tmp_path / "run").touch()
        board = writer(tmp_path / "run" / "board.json", bus)
        with pytest.raises(StateError):
            await board.publish()
        (tmp_path / "run").unlink()
        await board.publish()
        assert decode_board(board.path.read_bytes()).revisions[0].revision == "chat@1"

    asyncio.run(scenario())


def test_each_change_of_an_endpoint_is_told_once_also_while_the_board_cannot_be_written(tmp_path: Path) -> None:
    spec = read_spec({"name": "chat", "model": "m"})
    views: list[EndpointView] = []
    told: list[Event] = []

    async def scenario() -> None:
        (tmp_path / "run").touch()
        board = BoardWriter(
            tmp_path / "run" / "board.json",
            *(cast("Any", SilentBus()), Subjects("many"), lambda: ((), tuple(views)), RecordingReport(), told.append),
        )
        starting = EndpointView(spec, EndpointStatus("starting"), 0.0, 0.0)
        for views[:] in ([starting], [starting], []):
            with pytest.raises(StateError):
                await board.publish()

    asyncio.run(scenario())
    assert [(one.kind, one.what, one.endpoint) for one in told] == [
        ("state", "chat is starting", "chat"),
        ("state", "chat is gone", "chat"),
    ]
