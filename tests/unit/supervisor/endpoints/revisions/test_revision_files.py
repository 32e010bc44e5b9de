"""The files of a revision: all of them are made, or none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo_local.core.errors import StateError, SupervisorError
from dynamo_local.core.names import Revision, Watcher
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder, read_orders, write_order
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.endpoints.revisions.launch import Launched, RevisionFiles
from state.paths import StatePaths

CHAT = Revision("chat", 2)


class FullDisk:
    """The blueprint of a server whose disk is full, and its streams; both without the revision."""

    streams: tuple[str, ...] = ()

    def change(self, change: Any) -> None:
        if change(self) is not self:
            raise StateError("cannot write: no space left on device")

    def with_revision(self, templates: Any) -> object:
        return object()

    def without_revision(self, revision: str) -> FullDisk:
        return self

    async def create_streams(self, bus: Any, graph: Any, revision: str) -> None:
        self.streams = (*self.streams, revision)

    async def delete_streams(self, bus: Any, revision: str) -> None:
        self.streams = tuple(each for each in self.streams if each != revision)


class NoQueue(FullDisk):
    async def create_streams(self, bus: Any, graph: Any, revision: str) -> None:
        raise SupervisorError("no prefill queue")


@pytest.mark.parametrize("server", [FullDisk(), NoQueue()])
def test_what_cannot_be_made_whole_leaves_nothing(tmp_path: Path, server: Any) -> None:
    paths = StatePaths(tmp_path, "many")
    paths.run_dir.mkdir()
    files = RevisionFiles(paths, server, server, cast("Any", None))
    launched = Launched(ResolvedGraph("tests:Endpoints", "many", ()), ())
    with pytest.raises((StateError, SupervisorError)):
        asyncio.run(files.create(CHAT, launched))
    assert not paths.graph_of(str(CHAT)).exists()
    assert server.streams == ()


def test_a_process_with_its_weights_is_not_wanted_any_more(tmp_path: Path) -> None:
    paths, server = StatePaths(tmp_path, "many"), cast("Any", FullDisk())
    paths.prepared_dir.mkdir(parents=True)
    mine, other = (Watcher("many", "VllmWorker", 0, revision) for revision in ("chat@2", "chat@3"))
    for watcher in (mine, other):
        write_order(paths, watcher, PreparedOrder("key", "module", b"", 0, 0))
    files = RevisionFiles(paths, server, server, cast("Any", None))
    asyncio.run(files.remove(CHAT))
    assert set(read_orders(paths)) == {other}
