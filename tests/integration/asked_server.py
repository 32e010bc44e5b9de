"""The control API of a server that has a bus and files, and no processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.handlers import admin_handlers
from dynamo_local.supervisor.circus.process_registry import Registration
from dynamo_local.supervisor.control.api import ControlApi, ControlSocket
from state.files import make_sockets
from state.paths import StatePaths
from state.statefile.store import StateStore
from tests.integration.server_process import PATIENCE_S
from tests.unit.supervisor.recording import RecordingReport


@contextmanager
def answering(paths: StatePaths, address: BusAddress, *, hears: bool = True) -> Iterator[None]:
    """Answer at the namespace's socket, from a thread: commands have event loops of their own. `hears`: the connection
    to the bus stays."""
    loop = asyncio.new_event_loop()
    begun, over = loop.create_future(), asyncio.Event()

    async def serve() -> None:
        bus = await Bus.connect(address, name="server")
        watch = FleetWatch(bus, Subjects(paths.namespace), everywhere=True)
        store = StateStore(paths)
        asked = AskedServer(paths, store, cast("Any", None), lambda _: None)
        registration = Registration(store, watch.view.members, RecordingReport())
        watch.subscribe(registration.on_change)
        await asked.follow(bus, watch, registration)
        await watch.start()
        api = ControlApi()
        api.take(admin_handlers(asked))
        socket = ControlSocket(api, make_sockets(paths).control)
        if not hears:
            await bus.close()
        running = asyncio.create_task(socket.run())
        begun.set_result(None)
        await over.wait()
        await socket.close(running)
        await bus.close()

    async def until_begun() -> None:
        await asyncio.wait_for(asyncio.shield(begun), PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(loop.run_until_complete, serve())
        asyncio.run_coroutine_threadsafe(until_begun(), loop).result(PATIENCE_S)
        try:
            yield
        finally:
            loop.call_soon_threadsafe(over.set)
            served.result(PATIENCE_S)
            loop.close()
