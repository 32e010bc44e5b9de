"""A node server: brought up in order, kept running, taken down in reverse."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.bus.nats import Bus, publish_event
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, DynamoError, StateError, one_line
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.circus.ahead import CircusAhead
from dynamo_local.supervisor.node.agent import without_cluster
from dynamo_local.supervisor.node.head import MOST_BYTES, HeadSilence, NodeOrder, gone
from dynamo_local.supervisor.node.places import NodePlaces, NodePlans, forkserver_of
from dynamo_local.supervisor.places.far import PlacesService
from dynamo_local.supervisor.server.launch.plan import HttpAddress, Launch, stop_order
from dynamo_local.supervisor.server.machinery import Machinery
from dynamo_local.supervisor.server.nats.nats_server import write_bus_address
from dynamo_local.supervisor.server.settings import ServerSettings, StopRequest, handled_signals
from dynamo_local.supervisor.upkeep.devices import DeviceHolds
from state.devices.inventory import probe
from state.files import make_private_directory, remove_tree, replace_file
from state.locks import ServerLock, is_locked
from state.paths import STATE_DIR_VARIABLE, StatePaths, state_root
from state.record import ServerRecord
from state.statefile.leftovers import clear_leftovers


@dataclass(eq=False, repr=False)
class NodeServer:
    """Runs workers of one graph on this node. The caller holds the namespace's server lock, and has cleared leftovers.

    `on_ready` is called once orders are answered.
    """

    order: NodeOrder
    machinery: Machinery
    on_ready: Callable[[], None]
    _subjects: Subjects = field(init=False)
    _head: HeadSilence = field(init=False)

    def __post_init__(self) -> None:
        self._subjects = Subjects(self.order.namespace)
        self._head = HeadSilence(self.order.server)

    async def run(self, stop: StopRequest, watch_pid: int | None = None) -> None:
        """Run workers until a stop is wanted, or it ends by itself (head.py). Leaves nothing behind.

        `watch_pid`: a process with which this one ends. Raises SupervisorError, BusError when it cannot start.
        """
        machinery = self.machinery
        plans = () if machinery.launch.forkserver is None else (machinery.launch.forkserver,)
        async with AsyncExitStack() as stack:
            await machinery.make_files(stack, self.order.bus, plans)
            await asyncio.to_thread(write_bus_address, machinery.launch.paths.bus_file, self.order.bus)
            await machinery.start(stack)
            stack.push_async_callback(machinery.drain, stop_order(machinery.launch.graph), stop.hurry)
            stack.push_async_callback(machinery.tasks.close)
            machinery.keep(plans)
            machinery.tasks.spawn("operation", self._operate())
            machinery.tasks.spawn("head", self._stop_after(self._head.over(), stop))
            if watch_pid is not None:
                machinery.tasks.spawn("watched process", self._stop_after(gone(watch_pid), stop, hurry=True))
            await machinery.until(stop.wanted)
            machinery.events.stopping()

    async def _stop_after(self, over: Awaitable[str], stop: StopRequest, *, hurry: bool = False) -> None:
        """Stop for the reason that is awaited. `hurry`: at once, since the devices may be another one's by now."""
        self.machinery.report.step(f"stopping: {await over}")
        if hurry:
            stop.hurry.set()
        stop.wanted.set()

    async def _operate(self) -> None:
        machinery, settings = self.machinery, self.machinery.settings
        await machinery.begin()
        name = f"node {self.order.node}"
        address, file = self.order.bus, machinery.launch.paths.bus_file
        bus = await Bus.connect(address, name=name, deadline_s=settings.bus_deadline_s, file=file)
        try:
            machinery.events.listeners.append(self._tell(bus))
            await self._head.listen(bus, self._subjects)
            watch = FleetWatch(bus, self._subjects, everywhere=True)
            machinery.follow(watch)
            await watch.start()
            expiry = machinery.tasks.spawn("fleet", watch.run())
            machinery.hold_devices()
            await machinery.allow_changes(() if machinery.launch.forkserver is None else (machinery.launch.forkserver,))
            await asyncio.to_thread(machinery.files.remember)
            await self._serve(bus)
            await machinery.directory.note(ServerRecord("running"))
            self.on_ready()
            await expiry
        finally:
            await bus.close()

    async def _serve(self, bus: Bus) -> None:
        """Answer orders to this node."""
        machinery, inventory = self.machinery, self.machinery.launch.inventory
        local = machinery.place(inventory, machinery.circus, machinery.report)
        plans = NodePlans(self.order.node, machinery.launch.paths, inventory, machinery.blueprint)

        def present() -> set[str]:
            entries = machinery.store.read().components.values()
            return {entry.revision for entry in entries if entry.holds}

        async def learn(revision: str, graph: bytes) -> None:
            await asyncio.to_thread(plans.learn, revision, graph, present)

        places = NodePlaces(
            *(local.books, inventory, local.devices, local.watchers, local.log_file),
            plan=plans.plan,
            given_up=machinery.restarter.given_up,
        )
        service = PlacesService(places, machinery.tasks, learn)
        await service.serve(bus, self._subjects.node(self.order.node))
        await bus.flush()

    def _tell(self, bus: Bus) -> Callable[[Event], None]:
        """Tells the head of the deaths of processes."""

        async def publish(event: Event) -> None:
            try:
                await publish_event(bus, self._subjects, event)
            except BusError as error:
                self.machinery.report.step(f"an event could not be told: {error}")

        def tell(event: Event) -> None:
            if event.kind == "death":
                self.machinery.tasks.spawn("event", publish(event))

        return tell


# Runs a node server as its order says.

_NO_HTTP = HttpAddress("127.0.0.1", 0)
"""The root service, which has an address, is at the head."""


class _Lines:
    """A report (server.reports.report.Report) on standard error."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        self.say(f"[{time.monotonic() - self._began:6.1f}s] {text}")

    def say(self, text: str) -> None:
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            # Whoever reads has gone.
            return

    def pending(self, text: str) -> None:
        self.step(text)


def run(circusd: CircusAhead, argv: Sequence[str] | None = None) -> int:
    """Run until told to end, with a circusd that was started ahead. Returns the exit status."""
    arguments = _parse(argv)
    try:
        order = NodeOrder.decode(sys.stdin.buffer.read(MOST_BYTES + 1))
        order.check_versions()
        root = arguments.state_dir or state_root(os.environ).parent / "nodes" / order.node
        if arguments.state_dir is None:
            remove_left(root)
        environ = without_cluster(os.environ) | {STATE_DIR_VARIABLE: str(root.absolute())}
        os.environ.clear()
        os.environ.update(environ)
        asyncio.run(_run(order, StatePaths.of(order.namespace, environ), arguments.watch_pid, circusd))
    except DynamoError as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


async def _run(order: NodeOrder, paths: StatePaths, watch_pid: int | None, circusd: CircusAhead) -> None:
    stop, report = StopRequest(), _Lines()

    def on_signal() -> None:
        if stop.wanted.is_set():
            stop.hurry.set()
        stop.wanted.set()

    for number in handled_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    with ServerLock(paths) as lock, DeviceHolds(order.namespace) as holds:
        for note in clear_leftovers(lock):
            report.step(note)
        inventory = probe(order.slots, os.environ)
        forkserver = forkserver_of(order.graph, inventory, paths.root)
        launch = Launch(order.graph, inventory, paths, order.bus, _NO_HTTP, (), (), forkserver)
        settings = ServerSettings(ready_deadline_s=order.ready_deadline_s, drain_deadline_s=order.drain_deadline_s)
        machinery = Machinery(launch, settings, report, lock, holds, ahead=circusd, all_expendable=True)
        server = NodeServer(order, machinery, lambda: print("ready", flush=True))
        await server.run(stop, watch_pid)
    report.step("stopped")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dynamo_local.supervisor.node", description="Run a node server.")
    parser.add_argument("--state-dir", type=Path, help="folder of its state; by default one of the node's name")
    parser.add_argument("--watch-pid", type=int, help="process with which it ends")
    return parser.parse_args(argv)


# State folders of nodes, side by side: the id of a node that has ended is not used again.

_HOST = "host"
"""File in a folder: the machine that uses it. Several may have their folders on one file system, whose locks may tell
nothing of those of others."""

_KEPT_S = 3600.0
"""For those who want to read the logs; and a node server that is just starting holds no lock yet."""


def remove_left(root: Path) -> None:
    """Make `root`, this node's folder, and remove those beside it that this machine has used and in which no node
    server runs. Raises StateError if it cannot be made."""
    host = socket.gethostname()
    make_private_directory(root)
    replace_file(root / _HOST, host.encode(), durable=False)
    now = root.stat().st_mtime
    for folder in root.parent.iterdir():
        with suppress(OSError, StateError):
            is_ours = (folder / _HOST).read_text() == host
            if is_ours and now - folder.stat().st_mtime >= _KEPT_S and not any(map(is_locked, folder.glob("*.lock"))):
                remove_tree(folder)
