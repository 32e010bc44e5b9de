"""A frontend that only announces itself in the revisions that the board lists, as a watcher's process.

It is ready for a revision at once, and drains when another one takes its requests. $IN_FLIGHT names a file with the
number of requests that it has for each revision that takes none any more; the file with `.taken` behind its name has
that of each revision that takes some. A file with `.json` behind its name has, by endpoint, the requests in flight and
those of them that are held, and precedes both.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import Announcer
from dynamo_local.core.messages.endpoints import Board, BoardRevision
from dynamo_local.core.messages.presence import Counts, Presence, ProcessState
from dynamo_local.core.names import Watcher, endpoint_of, parse_watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.ancestry import die_as_environment_says
from state.machine.identity import machine_id
from state.paths import StatePaths

_EVERY_S = 0.05


@dataclass
class ImitatedFrontend:
    """`in_flight`: a file as described above."""

    bus: Bus
    paths: StatePaths
    watcher: Watcher
    lease: str
    in_flight: Path
    announced: dict[str, tuple[Announcer, asyncio.Task[None]]] = field(default_factory=dict)
    took: set[str] = field(default_factory=set)

    async def run(self) -> None:
        self._announce("").update(state="ready")
        while True:
            if self.paths.board_file.exists():
                self._follow(msgspec.json.decode(self.paths.board_file.read_bytes(), type=Board))
            await asyncio.sleep(_EVERY_S)

    def _follow(self, board: Board) -> None:
        for revision in board.revisions:
            self._serve(revision)
        for gone in self.announced.keys() - {"", *(revision.revision for revision in board.revisions)}:
            self.announced.pop(gone)[1].cancel()

    def _serve(self, revision: BoardRevision) -> None:
        if revision.takes_requests:
            self.took.add(revision.revision)
        drains = not revision.takes_requests and revision.revision in self.took
        state: ProcessState = "draining" if drains else "ready"
        file = self.in_flight if drains else self.in_flight.with_suffix(".taken")
        demand = self.in_flight.with_suffix(".json")
        if demand.exists():
            found = msgspec.json.decode(demand.read_bytes(), type=dict[str, tuple[int, int]])
            in_flight, held = found.get(endpoint_of(revision.revision), (0, 0))
        else:
            in_flight, held = _number(file), 0
        self._announce(revision.revision).update(state=state, counts=Counts(in_flight=in_flight, held=held))

    def _announce(self, revision: str) -> Announcer:
        if revision not in self.announced:
            presence = Presence(
                *(str(self.watcher), self.watcher.service, "frontend", self.lease, os.getpid(), "starting"),
                machine=machine_id(),
                revision=revision,
            )
            announcer = Announcer(self.bus, Subjects(self.watcher.namespace, revision), presence)
            self.announced[revision] = announcer, asyncio.create_task(announcer.run())
        return self.announced[revision][0]


def _number(file: Path) -> int:
    return int(file.read_text() or 0) if file.exists() else 0


async def main() -> None:
    watcher = parse_watcher(os.environ["DYN_WATCHER"])
    paths = StatePaths.of(watcher.namespace, os.environ)
    lease = os.urandom(8).hex()
    bus = await Bus.connect(BusAddress.load(paths.bus_file), name=str(watcher))
    frontend = ImitatedFrontend(bus, paths, watcher, lease, Path(os.environ["IN_FLIGHT"]))
    running = asyncio.create_task(frontend.run())
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    await bus.close()


if __name__ == "__main__":
    die_as_environment_says()
    asyncio.run(main())
