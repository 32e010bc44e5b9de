"""`dynamo serve`: runs one server in the foreground, under the lock on its namespace."""

from __future__ import annotations

import asyncio
import signal

from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.supervisor.server.launch import Launch
from dynamo_local.supervisor.server.report import Report
from dynamo_local.supervisor.server.server import Server, ServerSettings, StopRequest
from dynamo_local.supervisor.upkeep.devices import DeviceHolds, secured
from state.locks import ServerLock
from state.reconcile import clear_leftovers

_BUS_DEADLINE_S = 5.0


def serve(launch: Launch, settings: ServerSettings, report: Report) -> None:
    """Serve until a signal comes. The first signal stops the server in order, the next one cuts every wait short.

    Raises NamespaceBusyError when a server runs in the namespace, SupervisorError when services cannot be
    started or kept.
    """
    asyncio.run(_serve(launch, settings, report))


async def _serve(launch: Launch, settings: ServerSettings, report: Report) -> None:
    stop = StopRequest()
    loop = asyncio.get_running_loop()
    for number in handled_signals():
        loop.add_signal_handler(number, _on_signal, stop, report, number)
    # Blocking the event loop is right here: nothing else runs yet, and a signal is handled afterwards.
    with ServerLock(launch.paths) as lock, DeviceHolds(launch.graph.namespace) as holds:
        for note in clear_leftovers(lock):
            report.step(note)
        if launch.bus is not None:
            await _check_bus(launch.bus)
        launch = await secured(launch, holds)
        report.step(f"starting {launch.graph.target} in namespace {launch.graph.namespace}")
        await Server(launch, settings, report, lock, holds).run(stop)
    report.step("stopped")


def handled_signals() -> tuple[signal.Signals, ...]:
    """Signals that end the server. SIGHUP is not among them where it is ignored already, as by nohup."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


async def _check_bus(address: BusAddress) -> None:
    """Raise BusError, before anything is started, if the NATS server of others cannot be reached."""
    bus = await Bus.connect(address, name="check", deadline_s=_BUS_DEADLINE_S)
    await bus.close()


def _on_signal(stop: StopRequest, report: Report, number: signal.Signals) -> None:
    if stop.wanted.is_set():
        report.step(f"{number.name} again: not waiting any longer")
        stop.hurry.set()
    else:
        report.step(f"{number.name}: stopping (once more to hurry)")
        stop.wanted.set()
