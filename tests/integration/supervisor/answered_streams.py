"""A server of mockers whose clients all have to get the right answers, whatever is done to it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus, follow_address
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from tests.chaos.answers import Outcome
from tests.chaos.frontend import ChaosFrontend
from tests.chaos.settings import BLOCK_SIZE
from tests.integration.server_process import PATIENCE_S
from tests.integration.supervisor.scaled_server import NAMESPACE, ScaledServer

MOCKERS = [
    f"--{service}.{option}"
    for service in ("VllmWorker", "PrefillWorker")
    for option in ("engine=mocker", "mocker-step-base-ms=10", f"mocker-block-size={BLOCK_SIZE}")
]
GRAPH = "tests.integration.supervisor.roles_graph:Front"


def address(server: ScaledServer) -> BusAddress:
    return BusAddress.load(server.paths.bus_file)


@asynccontextmanager
async def streams(server: ScaledServer, count: int, *, loses_state: bool = False) -> AsyncIterator[ChaosFrontend]:
    """Clients that ask on and on; not one of them may get a wrong answer, or none. `loses_state`: a worker hangs for
    long, and answers that cannot be continued elsewhere are lost with it."""
    bus = await Bus.connect(address(server), name="test", file=server.paths.bus_file)
    frontend = ChaosFrontend(bus, Subjects(NAMESPACE, FIRST_OF_MAIN), f"{NAMESPACE}_Frontend", stall_s=PATIENCE_S)
    await follow_address(bus, Subjects(NAMESPACE), frontend.lease)
    await frontend.start()
    frontend.open_streams(count, "rotation")
    try:
        yield frontend
        assert await frontend.close_streams(PATIENCE_S) == 0
        assert frontend.results.failures == []
        assert loses_state or Outcome.STATE_LOST.value not in frontend.results.outcomes
    finally:
        await frontend.tasks.close()
        await bus.close()


async def until_answered(frontend: ChaosFrontend, more: int) -> None:
    """Wait until so many more requests have got the right answer."""
    wanted = frontend.results.right + more
    async with asyncio.timeout(PATIENCE_S):
        while frontend.results.right < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
