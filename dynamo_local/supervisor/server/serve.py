"""`dynamo serve`: one server in the foreground, from the lock on its namespace to its last file."""

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
    """Serve until a signal. The first one drains, the next cuts the waiting short.

    Raises NamespaceBusyError when a server runs in the namespace, SupervisorError when services cannot be
    started or kept.
    """
    asyncio.run(_serve(launch, settings, report))


async def _serve(launch: Launch, settings: ServerSettings, report: Report) -> None:
    stop = StopRequest()
    loop = asyncio.get_running_loop()
    for number in handled_signals():
        loop.add_signal_handler(number, _on_signal, stop, report, number)
    # Blocking is right here: nothing else runs yet, and a signal that comes is looked at afterwards.
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
    """Signals that end the server. Not SIGHUP where it is ignored: whoever did that (nohup) wants no end."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


async def _check_bus(address: BusAddress) -> None:
    """Raise BusError if the NATS server that is to be used cannot be, before anything is started."""
    bus = await Bus.connect(address, name="check", deadline_s=_BUS_DEADLINE_S)
    await bus.close()


def _on_signal(stop: StopRequest, report: Report, number: signal.Signals) -> None:
    if stop.wanted.is_set():
        report.step(f"{number.name} again: not waiting any longer")
        stop.hurry.set()
    else:
        report.step(f"{number.name}: stopping (once more to hurry)")
        stop.wanted.set()
