"""Logs by the control API: of processes here, and of those on nodes that do not always answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import GET_LOG
from dynamo_local.core.errors import SilentNodeError, UsageError
from dynamo_local.supervisor.control.api import ControlApi
from dynamo_local.supervisor.control.reports import LogAnswers
from dynamo_local.supervisor.places.local import LocalPlaces
from dynamo_local.supervisor.places.port import LogPart, Places
from dynamo_local.supervisor.server.reports.logs import FarFollower
from state.locks import ServerLock
from state.paths import StatePaths
from tests.unit.supervisor.control.listening import listening


class Node:
    """The log of a node that answers or not."""

    def __init__(self) -> None:
        self.lines = [f"line {number}" for number in range(9)]
        self.answers = True

    async def log(self, watcher: str, lines: int, after: int | None = None) -> LogPart:
        if not self.answers:
            raise SilentNodeError("node a does not answer")
        return LogPart(tuple(self.lines[after or 0 :][-lines:]), len(self.lines))


class Site:
    def __init__(self, paths: StatePaths) -> None:
        self.node = Node()
        self.follower = FarFollower(ControlClient(paths), "far_VllmWorker")

    async def last_lines(self, lines: int) -> list[str]:
        return await asyncio.to_thread(self.follower.last_lines, lines)

    async def new_lines(self) -> list[str]:
        return await asyncio.to_thread(self.follower.new_lines)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    paths, api = StatePaths(tmp_path, "far"), ControlApi()
    site = Site(paths)
    api.take(LogAnswers(cast(Places, site.node)).handlers)
    with ServerLock(paths):
        async with listening(api, paths):
            yield site


async def test_a_log_whose_node_did_not_answer_is_not_shown_from_its_beginning(site: Site) -> None:
    site.node.answers = False
    assert await site.last_lines(2) == []
    assert await site.new_lines() == []
    site.node.answers = True
    assert await site.new_lines() == ["line 7", "line 8"]
    site.node.answers = False
    assert await site.new_lines() == []
    site.node.lines.append("line 9")
    site.node.answers = True
    assert await site.new_lines() == ["line 9"]


async def test_a_log_that_begins_meanwhile_is_shown_from_its_beginning(site: Site) -> None:
    assert await site.new_lines() == site.node.lines


async def test_a_log_of_this_machine_is_read_from_its_file(tmp_path: Path) -> None:
    paths, api = StatePaths(tmp_path, "far"), ControlApi()
    unused = cast(Any, None)
    api.take(LogAnswers(LocalPlaces(unused, unused, unused, unused, paths.log_file)).handlers)

    def ask(watcher: str, **query: str) -> Any:
        return ControlClient(paths).do(GET_LOG, query=query, watcher=watcher)

    with ServerLock(paths):
        paths.logs_dir.mkdir(parents=True)
        paths.log_file("far_VllmWorker").write_text("one\ntwo\nthree\ncut o")
        async with listening(api, paths):
            shown = await asyncio.to_thread(ask, "far_VllmWorker", lines="2")
            assert shown == {"object": "log", "watcher": "far_VllmWorker", "lines": ["two", "three"], "end": 14}
            assert (await asyncio.to_thread(ask, "far_VllmWorker", after="4"))["lines"] == ["two", "three"]
            assert (await asyncio.to_thread(ask, "far_Router"))["lines"] == []
            with pytest.raises(UsageError):
                await asyncio.to_thread(ask, "..")
