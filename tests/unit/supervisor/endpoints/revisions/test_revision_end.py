"""The end of a revision: repeated until nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from dynamo_local.core.endpoints.rollout import End
from dynamo_local.core.errors import BusError, StateError, SupervisorError
from dynamo_local.core.names import Revision
from dynamo_local.supervisor.endpoints.revisions.revision import RevisionRun
from dynamo_local.supervisor.places.capacity import Startable
from tests.unit.state.builders import empty_state
from tests.unit.supervisor.endpoints.made_parts import endpoint_of, parts_of


class Failing:
    """Workers and files of a revision, whose removal fails in turn by these errors, and then succeeds."""

    def __init__(self, of_workers: list[Exception], of_files: list[Exception]) -> None:
        self.of_workers, self.of_files = of_workers, of_files
        self.removed = 0

    async def of(self, endpoint: str, report: object, *, gone: object) -> Failing:
        if self.of_workers:
            raise self.of_workers.pop(0)
        return self

    async def end_revision(self, revision: str) -> None:
        pass

    async def remove(self, revision: Revision) -> None:
        if self.of_files:
            raise self.of_files.pop(0)
        self.removed += 1


def run_of(files: object, actuators: object, memory: object, heard: Callable[[], None]) -> RevisionRun:
    parts = parts_of(files=files, actuators=actuators, memory=memory)
    return RevisionRun(Revision("chat", 1), parts, endpoint_of(heard))


def test_an_end_that_fails_is_repeated_and_nothing_is_wanted_meanwhile() -> None:
    async def scenario() -> None:
        failing = Failing([BusError("no NATS")], [StateError("full"), SupervisorError("gone")])
        woken = asyncio.Event()
        run = run_of(failing, failing, None, woken.set)
        run.launched = cast("Any", object())
        run.carry_out(End(1))
        assert run.wanted(3, 0, empty_state()) == (), "its templates may be gone"
        assert not run.seen(empty_state(), Startable()).is_gone
        await woken.wait()
        assert (failing.removed, run.seen(empty_state(), Startable()).is_gone) == (1, True)

    asyncio.run(scenario())
