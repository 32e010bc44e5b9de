"""Orders that come while an endpoint is being looked at."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dynamo_local.core.endpoints.registry import Registry, create, update
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.names import Revision
from dynamo_local.supervisor.endpoints.awake import KeptUsage
from dynamo_local.supervisor.endpoints.endpoint import EndpointRun
from dynamo_local.supervisor.endpoints.endpoint_tools import EndpointTools
from dynamo_local.supervisor.endpoints.revisions.tools import RevisionTools
from dynamo_local.supervisor.places.capacity import MachineCapacity, MachineFacts, Startable
from state.devices.allocation import cpu_slots
from state.statefile.model import State
from tests.unit.state.builders import empty_state
from tests.unit.supervisor.recording import RecordingReport


class Deaf:
    """A watch that hears nobody."""

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


class Launching:
    """Notes which revisions are launched, and lets none of them get ready."""

    def __init__(self) -> None:
        self.revisions: list[int] = []
        self.begun = asyncio.Event()

    async def launch(self, revision: Revision, spec: EndpointSpec, note: Any) -> None:
        self.revisions.append(revision.number)
        self.begun.set()
        await asyncio.Event().wait()


async def nothing() -> None:
    pass


async def startable(endpoint: str, state: State, wanted: object) -> Startable:
    return Startable()


def test_an_update_that_comes_while_the_statefile_is_read_is_looked_after() -> None:
    async def scenario() -> None:
        loop, launching = asyncio.get_running_loop(), Launching()
        created = create(Registry(), EndpointSpec(name="chat", model="m"), now=1)
        updated = update(created, EndpointSpec(name="chat", model="m", args={"seed": 1}), now=2)

        def read_state() -> State:
            # The loop goes on while the file is read in a thread: what is to happen meanwhile has happened then.
            asyncio.run_coroutine_threadsafe(order(), loop).result(10)
            return empty_state()

        async def order() -> None:
            run.order(updated.entries["chat"])

        run = EndpointRun(created.entries["chat"], tools(launching, read_state))
        looked_after = asyncio.create_task(run.run())
        begun = asyncio.create_task(launching.begun.wait())
        await asyncio.wait({looked_after, begun}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        ended = looked_after.done() and looked_after.exception()
        looked_after.cancel()
        begun.cancel()
        assert (ended, launching.revisions) == (False, [2])

    asyncio.run(scenario())


def tools(launching: Launching, read_state: Any) -> EndpointTools:
    report = RecordingReport()
    revisions = RevisionTools(
        launcher=cast("Any", launching),
        memory=cast("Any", None),
        files=cast("Any", None),
        watch=cast("Any", lambda subjects, on_change: Deaf()),
        given_up={},
        read_state=read_state,
        actuator=cast("Any", None),
        ask_to_park=cast("Any", None),
        on_failure=lambda revision, error: pytest.fail(error),
        renew=cast("Any", None),
        capacity=MachineCapacity(cpu_slots([0], 1), MachineFacts()),
        spawn=lambda name, work: asyncio.get_running_loop().create_task(work, name=name),
        namespace="many",
        frontend_deadline_s=1,
        drain_s=1,
    )
    return EndpointTools(
        kept=cast("Any", None),
        revisions=revisions,
        startable=startable,
        publish=nothing,
        touch=lambda: None,
        happened=lambda endpoint, what, why: None,
        record=lambda event: None,
        looked=lambda run: None,
        usage=KeptUsage(cast("Any", None), report, lambda: 0.0),
        report=report,
        wall_clock=lambda: 0.0,
    )
