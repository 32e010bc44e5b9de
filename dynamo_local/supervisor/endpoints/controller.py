"""The controller of endpoints: takes orders, and brings what runs to what is ordered, endpoint by endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from dynamo_local.core.endpoints.checks import check_devices, devices_of_worker
from dynamo_local.core.endpoints.registry import Entry, ordered
from dynamo_local.core.endpoints.spec import EndpointSpec, served_names
from dynamo_local.core.endpoints.turns import Limits
from dynamo_local.core.errors import DeviceError, EndpointConflictError
from dynamo_local.core.messages.endpoints import BoardRevision, EndpointView
from dynamo_local.core.names import MAIN, endpoint_of
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.endpoints.adapters import AdapterFolders, AdaptersOfBase
from dynamo_local.supervisor.endpoints.awake import KeptUsage
from dynamo_local.supervisor.endpoints.board import BoardWriter
from dynamo_local.supervisor.endpoints.endpoint import EndpointRun
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from dynamo_local.supervisor.endpoints.orders import Orders
from dynamo_local.supervisor.endpoints.parts import EndpointParts
from dynamo_local.supervisor.endpoints.record import EndpointRecord
from dynamo_local.supervisor.endpoints.revisions.launch import EndpointLauncher, RevisionFiles
from dynamo_local.supervisor.endpoints.revisions.memory import MemoryRoom
from dynamo_local.supervisor.endpoints.revisions.parking import Parking
from dynamo_local.supervisor.endpoints.turns import TurnKeeper
from dynamo_local.supervisor.keys.start import take_key_orders
from dynamo_local.supervisor.places.capacity import (
    THIS_MACHINE,
    Capacity,
    ClusterCapacity,
    MachineCapacity,
    MachineFacts,
)
from dynamo_local.supervisor.server.controlled import ControlledServer, Controller
from dynamo_local.supervisor.server.launch.models import on_cpu
from dynamo_local.supervisor.server.launch.plan import main_on_board
from dynamo_local.supervisor.server.launch.prepare import check_clustered, own_devices, own_names
from dynamo_local.tasks import TaskGuard
from state.devices.allocation import noun
from state.endpoints.registry import RegistryStore
from state.statefile.model import State

_END_S = 4.0
"""The time that tasks of endpoints have to end when the server does. What they leave undone goes with the server."""


class EndpointController:
    """Looks after all endpoints of one server. It alone changes their workers."""

    def __init__(
        self,
        server: ControlledServer,
        kept: KeptRegistry,
        launcher: EndpointLauncher,
        tasks: TaskGuard,
        capacity: Capacity,
        facts: MachineFacts,
    ) -> None:
        launch, paths, registration = server.launch, server.launch.paths, server.registration
        subjects = Subjects(paths.namespace)
        self._server = server
        self._kept = kept
        self._tasks = tasks
        self._capacity = capacity
        self._runs: dict[str, EndpointRun] = {}
        self._board = BoardWriter(
            *(paths.board_file, server.bus, subjects, self._contents, server.report, server.record)
        )
        self._record = EndpointRecord(server.record, server.report, server.bus, subjects, self._board)
        self._usage = KeptUsage(paths.endpoint_use_file, server.report, time.time)
        self._turns = TurnKeeper(
            *(self._runs, registration, capacity, self._board, self._record), Limits(server.settings.turn_s)
        )
        self._adapters = AdapterFolders(kept, self._runs, self._record, on_cpu=on_cpu(launch.inventory))
        self._parts = EndpointParts(
            *(server, tasks, kept, launcher),
            memory=MemoryRoom(paths, registration.read),
            files=RevisionFiles(paths, server.blueprint, server.streams, server.bus),
            parking=Parking(server.bus, paths.namespace),
            capacity=capacity,
            facts=facts,
            board=self._board,
            record=self._record,
            usage=self._usage,
            turns=self._turns,
        )
        self._orders = Orders(
            *(kept, self, self._adapters, self._board, self._record), own_names(launch.graph), time.time
        )

    async def run(self) -> None:
        """Bring up what is ordered, and carry out orders, until cancelled."""
        await asyncio.to_thread(self._usage.load)
        self._tasks.spawn("use of endpoints", self._usage.run())
        self._tasks.spawn("record of endpoints", self._record.run())
        for entry in self._kept.current.entries.values():
            self.begin(entry)
        await self._board.publish()
        control, handlers = self._server.control, self._orders.handlers
        control.take(handlers)
        try:
            self._tasks.spawn("turns of endpoints", self._turns.run())
            self._tasks.spawn("folders of adapters", self._adapters.run())
            await self._board.run()
        finally:
            # Nobody would look after an endpoint that is created while the server stops.
            control.withdraw(handlers)

    # What orders need.

    def run_of(self, name: str) -> EndpointRun | None:
        return self._runs.get(name)

    def begin(self, entry: Entry) -> None:
        self._board.touch()
        if entry.spec.adapter_of is not None:
            return
        run = EndpointRun(entry, self._parts)
        self._runs[run.name] = run
        self._tasks.spawn(f"endpoint {run.name}", self._look_after(run))

    def view(self, name: str) -> EndpointView | None:
        run = self._runs.get(name)
        entry = self._kept.current.entries.get(name) or (None if run is None else run.entry)
        base = None if entry is None else self._runs.get(entry.spec.adapter_of or "")
        return (
            None if entry is None else self._view(entry, {} if base is None else {base.name: self._adapters.of(base)})
        )

    def views(self) -> tuple[EndpointView, ...]:
        entries = self._kept.current.entries
        ending = [run.entry for name, run in self._runs.items() if name not in entries]
        bases = {entry.spec.adapter_of for entry in entries.values()}
        adapters = {name: self._adapters.of(run) for name, run in self._runs.items() if name in bases}
        return tuple(self._view(entry, adapters) for entry in (*entries.values(), *ending))

    async def _look_after(self, run: EndpointRun) -> None:
        await run.run()
        del self._runs[run.name]
        self._usage.forget(run.name)
        # Written soon, and again and again if the disk is full: that must not end the server.
        self._record.happened(run.name, "deleted")
        self._record.forget(run.name)

    def _view(self, entry: Entry, adapters: Mapping[str, AdaptersOfBase]) -> EndpointView:
        """`adapters`: by base."""
        spec = entry.spec
        run = self._runs.get(spec.name)
        if spec.adapter_of is not None:
            base = self._runs.get(spec.adapter_of)
            of = adapters.get(spec.adapter_of)
            status = self._adapters.status(spec, of, None if base is None else base.status())
        else:
            assert run is not None, "every endpoint with workers is looked after"
            status = run.status()
        history = self._record.of(spec.name)
        return EndpointView(spec, status, entry.created_at, entry.updated_at, served_names(spec), history=history)

    def _contents(self) -> tuple[tuple[BoardRevision, ...], tuple[EndpointView, ...]]:
        revisions = (each for run in self._runs.values() for each in run.board(self._adapters.listed(run)))
        return (*main_on_board(self._server.launch.graph), *revisions), self.views()

    async def check_machine(self, spec: EndpointSpec, others: Sequence[EndpointSpec]) -> None:
        on_nodes, total = self._server.launch.clustered, await asyncio.to_thread(self._capacity.total)
        if on_nodes:
            check_clustered(spec)
        check_devices(spec, others, total, noun(self._capacity.kind, 2), on_nodes=on_nodes)

    async def check_update(self, run: EndpointRun, spec: EndpointSpec) -> None:
        """Raise EndpointConflictError if the first worker of another revision has no device, and the present revision
        has only one worker."""
        if run.status().ready > 1:
            return
        try:
            await self._require_devices(await asyncio.to_thread(self._server.registration.read), spec)
        except DeviceError:
            raise EndpointConflictError(
                f"no device is free for a worker of the new revision of {spec.name}, beside the only one of the old",
                'end the old one first by "replace": true, or another worker',
            ) from None

    async def check_wake(self, run: EndpointRun) -> None:
        """Raise EndpointConflictError if an endpoint that is asleep has no device to wake on, and nobody yields one."""
        if run.idleness.rest != "asleep" or self._may_yield(run.name):
            return
        spec = run.entry.spec
        state = await asyncio.to_thread(self._server.registration.read)
        try:
            await self._require_devices(state, spec)
        except DeviceError as error:
            holders = {endpoint_of(c.revision) for c in state.components.values() if c.holds}
            listed = ", ".join(sorted(holders - {"", MAIN})) or "the server's own workers"
            raise EndpointConflictError(
                f"endpoint {spec.name} cannot be woken: {error.cause}",
                f"devices are held by {listed}: lower the workers of one, or delete it",
            ) from None

    async def _require_devices(self, state: State, spec: EndpointSpec) -> None:
        """Raise DeviceError if no devices are free for one more worker of an endpoint."""
        require, amount = self._capacity.require, devices_of_worker(spec)
        await asyncio.to_thread(require, state, spec.name, amount, virtual=spec.engine == "mocker")

    def _may_yield(self, to: str) -> bool:
        """Whether another endpoint has workers that it is not to keep whatever happens."""
        others = (run for name, run in self._runs.items() if name != to and not run.deleting)
        return any(run.has_more_than_minimum for run in others)


def endpoint_controller(launcher: EndpointLauncher, facts: MachineFacts = THIS_MACHINE) -> Controller:
    """Return the controller of a server's endpoints, which opens the registry once the server has started."""

    async def run(server: ControlledServer) -> None:
        kept = await _open(server)
        await take_key_orders(server)
        tasks = TaskGuard()
        try:
            controller = EndpointController(server, kept, launcher, tasks, _capacity(server, facts), facts)
            tasks.spawn("endpoints", controller.run())
            await tasks.failed()
        finally:
            await tasks.close(_END_S)

    return run


async def _open(server: ControlledServer) -> KeptRegistry:
    """The registry, with the endpoints that the command line gives. Raises StateError, UsageError."""
    kept = await KeptRegistry.open(RegistryStore(server.lock), server.report)
    await kept.change(lambda before: ordered(before, server.launch.endpoints, time.time()))
    return kept


def _capacity(server: ControlledServer, facts: MachineFacts) -> Capacity:
    launch = server.launch
    own = own_devices(launch.templates)
    if server.nodes is None:
        return MachineCapacity(launch.inventory, facts, own)
    return ClusterCapacity(server.blueprint.current().inventory.kind, server.nodes, own)
