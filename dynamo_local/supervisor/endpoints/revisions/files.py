"""The files of an endpoint's revision in the run directory, and its streams on the bus: made before its workers start,
removed when they have ended. (upkeep/files.py writes them anew if they are removed meanwhile.)"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.names import Revision
from dynamo_local.process.forkserver.prepared.orders import withdraw
from dynamo_local.supervisor.endpoints.revisions.launch import Launched
from dynamo_local.supervisor.server.launch.blueprint import BlueprintFile
from dynamo_local.supervisor.server.nats.streams import ServerStreams
from dynamo_local.tasks import finish_in_thread
from state.files import make_private_directory, replace_file, system_errors
from state.paths import StatePaths


@dataclass(frozen=True)
class RevisionFiles:
    """The graph file, the part of the blueprint, and the prefill queue of each revision of a server."""

    paths: StatePaths
    blueprint: BlueprintFile
    streams: ServerStreams
    bus: Bus

    async def create(self, revision: Revision, launched: Launched) -> None:
        """Make all that workers and frontends of the revision need, or nothing. Raises StateError, SupervisorError."""
        name = str(revision)
        try:
            # A launch may be cancelled, and is followed by `remove`: nothing is to be made after that.
            await finish_in_thread(lambda: _write(self.paths.graph_of(name), launched.graph.to_json()))
            await self.streams.create_streams(self.bus, launched.graph, name)
            await finish_in_thread(lambda: self.blueprint.change(lambda old: old.with_revision(launched.templates)))
        except DynamoError:
            with suppress(DynamoError):
                await self.remove(revision)
            raise

    async def remove(self, revision: Revision) -> None:
        """Remove what `create` has made. Harmless if there is nothing. Raises StateError, SupervisorError."""
        name = str(revision)
        # First, so that the graph is not written anew.
        await asyncio.to_thread(self.blueprint.change, lambda old: old.without_revision(name))
        await asyncio.to_thread(_remove, self.paths.graph_of(name))
        await asyncio.to_thread(withdraw, self.paths, name)
        await self.streams.delete_streams(self.bus, name)


def _write(path: Path, data: bytes) -> None:
    make_private_directory(path.parent)
    replace_file(path, data, durable=False)


def _remove(path: Path) -> None:
    with system_errors(f"cannot remove {path}"):
        path.unlink(missing_ok=True)
