"""Orders that come while an endpoint is being looked at."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo_local.core.endpoints.registry import Registry, create, update
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.names import Revision
from dynamo_local.supervisor.endpoints.endpoint import EndpointRun
from state.statefile.model import State
from tests.unit.state.builders import empty_state
from tests.unit.supervisor.endpoints.made_parts import parts_of


class Launching:
    """Notes which revisions are launched, and lets none of them get ready."""

    def __init__(self) -> None:
        self.revisions: list[int] = []
        self.begun = asyncio.Event()

    async def launch(self, revision: Revision, spec: EndpointSpec, note: Any) -> None:
        self.revisions.append(revision.number)
        self.begun.set()
        await asyncio.Event().wait()


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

        run = EndpointRun(created.entries["chat"], parts_of(read=read_state, launcher=launching))

        looked_after = asyncio.create_task(run.run())
        begun = asyncio.create_task(launching.begun.wait())
        await asyncio.wait({looked_after, begun}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        ended = looked_after.done() and looked_after.exception()
        looked_after.cancel()
        begun.cancel()
        assert (ended, launching.revisions) == (False, [2])

    asyncio.run(scenario())
