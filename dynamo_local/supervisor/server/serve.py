"""`dynamo serve`: runs one server in the foreground, under the lock on its namespace."""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.jetstream.owner_record import BusRecord
from dynamo_local.bus.nats import Bus
from dynamo_local.core.codec import prepare_structs
from dynamo_local.core.errors import BusError
from dynamo_local.supervisor.server.controlled import Controller
from dynamo_local.supervisor.server.launch.plan import Launch
from dynamo_local.supervisor.server.machinery import Machinery
from dynamo_local.supervisor.server.ownership import Ownership, owner_at
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.server.server import Server
from dynamo_local.supervisor.server.settings import ServerSettings, StopRequest, handled_signals
from dynamo_local.supervisor.upkeep.devices import DeviceHolds, secured
from dynamo_local.tasks import TaskGuard, unless
from state.endpoints.registry import forget
from state.locks import ServerLock
from state.statefile.leftovers import clear_leftovers

_BUS_DEADLINE_S = 5.0


def serve(launch: Launch, settings: ServerSettings, report: Report, controller: Controller | None = None) -> None:
    """Serve until a signal comes. The first signal stops the server in order, the next one cuts every wait short.

    `controller`: runs within the server (server/controlled.py). Raises NamespaceBusyError when a server runs in the
    namespace, here or elsewhere on the same bus, SupervisorError when services cannot be started or kept,
    KeyboardInterrupt if Ctrl-C has ended the server before it was ready.
    """
    if sys.__stderr__ is not None:
        # A crash of the interpreter ends everything else as well: it says at least where it was.
        faulthandler.enable(sys.__stderr__)
    prepare_structs()
    if asyncio.run(_serve(launch, settings, report, controller)):
        raise KeyboardInterrupt


async def _serve(launch: Launch, settings: ServerSettings, report: Report, controller: Controller | None) -> bool:
    """Returns whether Ctrl-C has ended the server before it was ready."""
    stop = StopRequest()
    loop = asyncio.get_running_loop()
    server: Server | None = None
    interrupted = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal interrupted
        is_ready = server is not None and server.was_ready
        interrupted |= number is signal.SIGINT and not is_ready
        _on_signal(stop, report, number, is_ready=is_ready)

    for number in handled_signals():
        loop.add_signal_handler(number, on_signal, number)
    # Blocking the event loop is right here: nothing else runs yet, and a signal is handled afterwards.
    with ServerLock(launch.paths) as lock, DeviceHolds(launch.graph.namespace) as holds:
        for note in clear_leftovers(lock):
            report.step(note)
        if launch.forget and forget(lock):
            report.step("dropped the endpoints that were ordered earlier")
        ownership = Ownership(launch.graph.namespace, owner_at(launch.paths.root), report)
        async with owned(launch.bus, launch.graph.namespace, ownership, stop) as kept:
            if not stop.wanted.is_set():
                launch = await secured(launch, holds)
                report.step(f"starting the services (namespace {launch.graph.namespace})")
                machinery = Machinery(launch, settings, report, lock, holds)
                server = Server(machinery, ownership, kept, controller)
                await server.run(stop)
    report.step("stopped")
    return interrupted


@asynccontextmanager
async def owned(
    address: BusAddress | None, namespace: str, ownership: Ownership, stop: StopRequest
) -> AsyncIterator[TaskGuard]:
    """Own the namespace on the NATS server of others from before anything is started until all has ended; with a NATS
    server of our own (None) the server sees to that. A stop that is wanted meanwhile ends the attempt.

    Raises BusError if it cannot be reached, NamespaceBusyError if a server elsewhere owns the namespace there.
    """
    kept = TaskGuard()
    if address is None:
        yield kept
        return
    bus = await Bus.connect(address, name="owner", deadline_s=_BUS_DEADLINE_S)
    try:
        record = BusRecord(bus, namespace)
        # Without JetStream, or room in it, nothing is created that could be another one's, and who needs it says so.
        # The server tries again while it runs.
        with suppress(BusError):
            await unless(stop.wanted.wait(), ownership.confirm(record))
        kept.spawn("ownership", ownership.keep(record))
        try:
            yield kept
        finally:
            await kept.close()
            with suppress(BusError):
                await ownership.release(record)
    finally:
        await bus.close()


def _on_signal(stop: StopRequest, report: Report, number: signal.Signals, *, is_ready: bool) -> None:
    if stop.wanted.is_set():
        report.step(f"{_name(number)} again: ending all processes now")
        stop.hurry.set()
    else:
        again = "press Ctrl-C again" if number is signal.SIGINT else "send it again"
        what = "finishing the requests in flight, then stopping" if is_ready else "stopping what has been started"
        report.step(f"{_name(number)}: {what} ({again} to force)")
        stop.wanted.set()


def _name(number: signal.Signals) -> str:
    return "Ctrl-C" if number is signal.SIGINT else number.name
