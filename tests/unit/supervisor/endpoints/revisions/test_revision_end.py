"""The end of a revision: repeated until nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from dynamo_local.core.endpoints.rollout import End
from dynamo_local.core.errors import BusError, StateError, SupervisorError
from dynamo_local.core.names import Revision
from dynamo_local.supervisor.endpoints.revisions.revision import RevisionRun
from dynamo_local.supervisor.endpoints.revisions.tools import RevisionTools
from dynamo_local.supervisor.places.capacity import MachineCapacity, MachineFacts, Startable
from state.devices.allocation import cpu_slots
from tests.unit.state.builders import empty_state


class Failing:
    """Workers and files of a revision, whose removal fails in turn by these errors, and then succeeds."""

    def __init__(self, of_workers: list[Exception], of_files: list[Exception]) -> None:
        self.of_workers, self.of_files = of_workers, of_files
        self.removed = 0

    async def actuator(self, endpoint: str) -> Failing:
        if self.of_workers:
            raise self.of_workers.pop(0)
        return self

    async def end_revision(self, revision: str) -> None:
        pass

    async def remove(self, revision: Revision) -> None:
        if self.of_files:
            raise self.of_files.pop(0)
        self.removed += 1


def run_of(files: object, actuator: object, memory: object, heard: Callable[[], None]) -> RevisionRun:
    tools = RevisionTools(
        launcher=cast("Any", None),
        memory=cast("Any", memory),
        renew=cast("Any", None),
        capacity=MachineCapacity(cpu_slots([0], 1), MachineFacts()),
        files=cast("Any", files),
        watch=cast("Any", None),
        given_up={},
        read_state=empty_state,
        actuator=cast("Any", actuator),
        ask_to_park=cast("Any", None),
        on_failure=lambda revision, error: pytest.fail(error),
        spawn=lambda name, work: asyncio.get_running_loop().create_task(work, name=name),
        namespace="many",
        frontend_deadline_s=1,
        drain_s=1,
        retry_s=0,
    )
    return RevisionRun(Revision("chat", 1), tools, heard)


def test_an_end_that_fails_is_repeated_and_nothing_is_wanted_meanwhile() -> None:
    async def scenario() -> None:
        failing = Failing([BusError("no NATS")], [StateError("full"), SupervisorError("gone")])
        woken = asyncio.Event()
        run = run_of(failing, failing.actuator, None, woken.set)
        run.launched = cast("Any", object())
        run.carry_out(End(1))
        assert run.wanted(3, 0, empty_state()) == (), "its templates may be gone"
        assert not run.seen(empty_state(), Startable()).is_gone
        await woken.wait()
        assert (failing.removed, run.seen(empty_state(), Startable()).is_gone) == (1, True)

    asyncio.run(scenario())
