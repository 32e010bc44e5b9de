"""Creates a server's run directory and statefile when it starts, and removes them, with what is left, when it ends."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.errors import StateError
from dynamo_local.core.messages.endpoints import Board
from dynamo_local.core.names import NAMESPACE_ENV
from dynamo_local.supervisor.server.launch.blueprint import BlueprintFile
from dynamo_local.supervisor.server.launch.plan import Launch, main_on_board
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.supervisor.server.nats.nats_server import NatsServer
from dynamo_local.supervisor.server.reports import logs
from dynamo_local.supervisor.server.reports.report import Report
from state.files import make_private_directory, make_run_directory, make_sockets, write_private
from state.locks import ServerLock
from state.machine.processes import ProcFs, this_process
from state.paths import STATE_DIR_VARIABLE, Sockets
from state.record import ServerRecord, write_record
from state.remains import remove_remains
from state.statefile.leftovers import leftovers
from state.statefile.model import recorded_environment
from state.statefile.store import StateStore
from state.statefile.transitions import claim, new_state

# Survivors have been told to end before: they get no time for it again.
_SURVIVOR_TERM_S = 0.0
_SURVIVOR_KILL_S = 10.0


@dataclass
class RunDirectory:
    """The files of one server. Each method that creates some registers their removal on the stack that it is given."""

    launch: Launch
    store: StateStore
    lock: ServerLock
    report: Report

    async def create(self, stack: AsyncExitStack, bus: NatsServer | BusAddress) -> Sockets:
        """Make the directories, and write the files that processes and commands read. Raises StateError.

        `bus`: a NATS server of our own, whose configuration is written as well, or the address of another.
        """
        stack.push_async_callback(self._unless_replaced, lambda: remove_remains(self.launch.paths))
        await asyncio.to_thread(make_run_directory, self.launch.paths)
        await asyncio.to_thread(logs.start_afresh, self.launch.paths.logs_dir)
        await asyncio.to_thread(write_record, self.launch.paths, ServerRecord("starting"))
        await asyncio.to_thread(write_private, self.launch.paths.graph_file, self.launch.graph.to_json())
        await asyncio.to_thread(self._write_main)
        if isinstance(bus, NatsServer):
            await asyncio.to_thread(bus.write_files)
        return await asyncio.to_thread(make_sockets, self.launch.paths)

    def _write_main(self) -> None:
        """Tell frontends and workers of the model that the graph has itself."""
        revisions = main_on_board(self.launch.graph)
        for each in revisions:
            path = self.launch.paths.graph_of(each.revision)
            make_private_directory(path.parent)
            write_private(path, self.launch.graph.to_json())
        write_private(self.launch.paths.board_file, msgspec.json.encode(Board(revisions=revisions)))

    async def create_state(self, stack: AsyncExitStack, sockets: Sockets, plans: Sequence[WatcherPlan]) -> None:
        """Write the statefile, with a claim for each planned watcher. Raises StateError."""
        state = new_state(
            self.launch.graph.namespace,
            sockets.circus_endpoint,
            self.launch.inventory.kind,
            this_process(),
            self._environment(),
        )
        for plan in plans:
            cmd = shlex.join(plan.argv)
            state = claim(
                *(state, plan.watcher),
                role=plan.role,
                cmd=cmd,
                devices=plan.devices,
                share=plan.share,
                revision=plan.revision,
            )
        await asyncio.to_thread(self.store.create, state)
        stack.push_async_callback(self._unless_replaced, self.store.remove)
        stack.push_async_callback(self._unless_replaced, self._end_survivors)

    async def note(self, record: ServerRecord) -> None:
        """Replace the server's record of itself. A failure is only reported: nothing but `dynamo ls` depends on it."""
        try:
            await self._unless_replaced(lambda: write_record(self.launch.paths, record))
        except StateError as error:
            self.report.step(f"`dynamo ls` does not show that this server is {record.phase}: {error}")

    async def forbid_changes(self, blueprint: BlueprintFile) -> None:
        """Have nobody add or remove workers any more: the server is about to stop."""
        await self._unless_replaced(blueprint.end)

    def _environment(self) -> dict[str, str]:
        own = {
            NAMESPACE_ENV: self.launch.graph.namespace,
            STATE_DIR_VARIABLE: str(self.launch.paths.root),
        }
        return recorded_environment(os.environ) | own

    async def _unless_replaced(self, remove: Callable[[], object]) -> None:
        # Another server that has taken this one's place has files and processes of the same names.
        if self.lock.held:
            await asyncio.to_thread(remove)

    def _end_survivors(self) -> None:
        """Kill processes that the drain missed: one that left its process group, or a child of a killed circusd."""
        processes = ProcFs()
        survivors = leftovers(self.launch.paths, processes.snapshot())
        for stubborn in processes.end(survivors, _SURVIVOR_TERM_S, _SURVIVOR_KILL_S):
            self.report.step(f"process {stubborn.pid} cannot be ended: it may hang in a driver")
