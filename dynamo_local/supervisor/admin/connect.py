"""The one way to a running server: its statefile, its bus, or the reason why it cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.core.errors import NotRunningError
from dynamo_local.supervisor.server.blueprint import check_reachable, why_absent
from state.locks import server_pid
from state.model import State
from state.paths import StatePaths
from state.store import StateStore

_CONNECT_WITHIN_S = 2.0


@asynccontextmanager
async def bus_of(paths: StatePaths, name: str) -> AsyncIterator[Bus]:
    """Connect to the bus of the namespace's server, as a client called `name`.

    Raises NotRunningError when no server runs, SupervisorError when it is only starting or is ending, BusError when the
    bus does not answer.
    """
    await asyncio.to_thread(_check_running, paths)
    if not await asyncio.to_thread(paths.bus_file.exists):
        raise why_absent(paths)
    address = await asyncio.to_thread(BusAddress.load, paths.bus_file)
    bus = await Bus.connect(address, name=name, deadline_s=_CONNECT_WITHIN_S)
    try:
        yield bus
    finally:
        await bus.close()


async def state_of(paths: StatePaths) -> State:
    """Read the statefile of the namespace's server, whose circusd can be asked.

    Raises NotRunningError when no server runs, SupervisorError when it is only starting or is ending, StateError when
    the file cannot be read.
    """
    return await asyncio.to_thread(_read_state, paths)


def _read_state(paths: StatePaths) -> State:
    _check_running(paths)
    try:
        state = StateStore(paths).read()
    except NotRunningError as error:
        raise why_absent(paths) from error
    check_reachable(paths, state)
    return state


def _check_running(paths: StatePaths) -> None:
    if server_pid(paths) is not None:
        return
    crashed = paths.statefile.exists()
    raise NotRunningError(
        f"no server runs in namespace {paths.namespace}{' (one that crashed left a statefile)' if crashed else ''}",
        "`dynamo stop` removes what it left" if crashed else "start one with `dynamo serve`",
    )
