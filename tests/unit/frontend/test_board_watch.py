"""A frontend knows the board of endpoints before it listens, however the board changes meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec

from components.frontend.endpoints.served_models import BoardWatch
from dynamo_local.bus.nats import Bus, RawMessage
from dynamo_local.core.messages.endpoints import Board, BoardRevision
from dynamo_local.core.subjects import Subjects

FIRST, SECOND = (Board(number, (BoardRevision(f"chat@{number}", True, ("chat",)),)) for number in (1, 2))


class ChangingBus:
    """The board changes while a frontend subscribes; nobody tells of it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def subscribe(self, _: str, __: Callable[[RawMessage], Awaitable[None]]) -> None:
        self._path.write_bytes(msgspec.json.encode(SECOND))


async def test_the_board_is_known_when_the_start_returns(tmp_path: Path) -> None:
    path, seen = tmp_path / "board.json", list[Board]()
    path.write_bytes(msgspec.json.encode(FIRST))
    bus = cast(Bus, ChangingBus(path))
    await BoardWatch(path, bus, Subjects("ns"), seen.append).start()
    assert seen == [SECOND]
