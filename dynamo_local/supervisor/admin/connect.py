"""The way to the bus of a running server, or the reason why it cannot be reached, and questions to single processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dynamo_local.bus.address import BusAddress
from dynamo_local.control.absence import absent_server, why_absent
from dynamo_local.core.errors import BusError
from dynamo_local.core.names import short_watcher
from dynamo_local.core.subjects import Subjects
from state.namespaces import find_servers, is_running
from state.paths import StatePaths

if TYPE_CHECKING:
    from dynamo_local.bus.nats import Bus

_M = TypeVar("_M")

_CONNECT_WITHIN_S = 2.0


@asynccontextmanager
async def bus_of(paths: StatePaths, name: str) -> AsyncIterator[Bus]:
    """Connect to the bus of the namespace's server, as a client called `name`.

    Raises NotRunningError when no server runs, SupervisorError when it is only starting or is stopping, BusError when
    the bus does not answer.
    """
    # Here, since commands that ask no process are faster without the NATS client.
    from dynamo_local.bus.nats import Bus
    from dynamo_local.bus.renewal import follow_address

    await asyncio.to_thread(_check_running, paths)
    if not await asyncio.to_thread(paths.bus_file.exists):
        raise why_absent(paths)
    address = await asyncio.to_thread(BusAddress.load, paths.bus_file)
    bus = await Bus.connect(address, name=name, deadline_s=_CONNECT_WITHIN_S, file=paths.bus_file)
    try:
        await follow_address(bus, Subjects(paths.namespace))
        yield bus
    finally:
        await bus.close()


async def ask(
    bus: Bus, watcher: str, subject: str, question: msgspec.Struct, reply: type[_M], *, timeout_s: float
) -> _M:
    """Ask the process of a watcher, which listens on `subject`. Raises BusError that names the watcher, and DecodeError
    if the answer is something else."""
    try:
        return await bus.ask(subject, question, reply, timeout_s=timeout_s)
    except BusError as error:
        raise unanswered(watcher) from error


def unanswered(watcher: str) -> BusError:
    """The error for a process that does not answer."""
    name = short_watcher(watcher)
    return BusError(
        f"{name} does not answer", f"it may have ended or be overloaded: see `dynamo ps` and `dynamo logs {name}`"
    )


def _check_running(paths: StatePaths) -> None:
    if is_running(paths):
        return
    raise absent_server(paths.namespace, find_servers(paths.root))
