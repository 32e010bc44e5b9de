"""A way to a running server, for commands: its bus, or the reason why it cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.core.errors import NotRunningError
from dynamo_local.supervisor.server.blueprint import why_absent
from state.locks import server_pid
from state.paths import StatePaths

_CONNECT_WITHIN_S = 2.0


@asynccontextmanager
async def bus_of(paths: StatePaths, name: str) -> AsyncIterator[Bus]:
    """The bus of the namespace's server, as a client called `name`. Raises NotRunningError when none runs, BusError
    when the bus does not answer."""
    if await asyncio.to_thread(server_pid, paths) is None:
        raise NotRunningError(f"no server runs in namespace {paths.namespace}", "start one with `dynamo serve`")
    if not await asyncio.to_thread(paths.bus_file.exists):
        raise why_absent(paths)
    address = await asyncio.to_thread(BusAddress.load, paths.bus_file)
    bus = await Bus.connect(address, name=name, deadline_s=_CONNECT_WITHIN_S)
    try:
        yield bus
    finally:
        await bus.close()
