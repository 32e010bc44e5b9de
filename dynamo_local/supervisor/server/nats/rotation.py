"""Replaces the token of the server's own NATS while requests run.

1. NATS takes both tokens: its configuration is replaced, and it reads it anew (SIGHUP).
2. The file of the address holds the new token: who connects from now on presents that.
3. All processes are told, and connect anew. They tell when they have.
4. NATS takes the new token alone. It ends the connections of those that were not heard of; these read the file and
   connect again.

Each file is replaced atomically, and after each step whoever starts or connects, NATS included, finds a token that is
valid: a kill at any moment leaves a server that goes on. What fails before step 2 is undone; what fails later leaves
both tokens valid, and another rotation ends them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.control.operations import Call
from dynamo_local.core.errors import BusError, BusRefusedError, DynamoError, SupervisorError
from dynamo_local.core.messages.admin import AddressChanged, AddressTaken
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import short_watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.server.nats.nats_server import NatsServer, write_bus_address
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

RELOAD_S = 10.0
"""Longest wait until NATS goes by its new configuration."""
TAKEN_S = 10.0
"""Longest wait for processes to connect by the new token."""
_TELL_EVERY_S = 0.5
_LOOK_EVERY_S = 0.1
_ATTEMPT_S = 2.0


@dataclass(frozen=True)
class Rotated:
    """A rotation that is done. `processes`: number of those that said to have the new token; `disconnected`: watchers
    of those that did not."""

    processes: int
    disconnected: tuple[str, ...]


@dataclass
class TokenRotation:
    """Replaces tokens, one after another.

    `server`: the NATS server as it is now, and `watcher` that of its process. `members` returns the presences of all
    processes. `remember` is called when files have changed that are repaired by what they held last.
    """

    server: NatsServer
    circus: CircusClient
    watcher: str
    bus: Bus
    bus_file: Path
    subjects: Subjects
    members: Callable[[], Collection[Presence]]
    remember: Callable[[], None]

    async def rotate(self) -> Rotated:
        """Replace the token. Raises StateError, SupervisorError, BusError; what is valid then: see above."""
        before, both = self.server, self.server.with_new_token()
        try:
            await self._apply(both)
            await self._until_valid(both)
            await asyncio.to_thread(write_bus_address, self.bus_file, both.address)
        except DynamoError:
            await self._undo(before)
            raise
        self.server = both
        await asyncio.to_thread(self.remember)
        rotated = await self._tell()
        alone = both.without_former()
        await self._apply(alone)
        self.server = alone
        await self._until_ended(alone, before.address)
        return rotated

    async def _apply(self, server: NatsServer) -> None:
        await asyncio.to_thread(server.write_files)
        await asyncio.to_thread(self.remember)
        await self._reload(server)

    async def _reload(self, server: NatsServer) -> None:
        """Have NATS read its configuration anew. One that is only starting reads it anyway. Raises SupervisorError."""
        # There is none while it is restarted.
        for pid in await self.circus.pids(self.watcher):
            # Before it listens, the signal would end it.
            if server.listens(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGHUP)

    async def _undo(self, before: NatsServer) -> None:
        try:
            await self._apply(before)
        except DynamoError as error:
            # The failure that is being handled is the one to report. NATS takes one token too many, which nobody has.
            _log.warning("the configuration of NATS could not be put back: %s", error)

    async def _until_valid(self, server: NatsServer) -> None:
        async with _within(RELOAD_S, "NATS does not take the new token"):
            while not await _takes(server.address):
                await asyncio.sleep(_LOOK_EVERY_S)
                await self._reload(server)

    async def _until_ended(self, server: NatsServer, former: BusAddress) -> None:
        async with _within(RELOAD_S, "NATS still takes the former token"):
            while await _takes(former) is not False:
                await asyncio.sleep(_LOOK_EVERY_S)
                await self._reload(server)

    async def _tell(self) -> Rotated:
        """Have all processes connect by the new token, this one first."""
        user = await self.bus.renew()
        taken: set[str] = set()

        async def on_taken(answer: AddressTaken) -> None:
            if answer.user == user and answer.lease:
                taken.add(answer.lease)

        subject, inbox = self.subjects.address_changes, self.bus.inbox()
        answers = await self.bus.listen(inbox, AddressTaken, on_taken)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(TAKEN_S):
                    while True:
                        await self.bus.send(subject, AddressChanged(), reply=inbox)
                        await asyncio.sleep(_TELL_EVERY_S)
                        if all(member.lease in taken for member in self.members()):
                            break
        finally:
            await answers.unsubscribe()
        missing = sorted(member.watcher for member in self.members() if member.lease not in taken)
        return Rotated(len(taken), tuple(missing))


async def _takes(address: BusAddress) -> bool | None:
    """Whether NATS takes the token; None if it does not answer."""
    try:
        bus = await Bus.connect(address, name="check", deadline_s=_ATTEMPT_S)
    except BusRefusedError:
        return False
    except BusError:
        return None
    await bus.close()
    return True


@asynccontextmanager
async def _within(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        remedy = "see `dynamo logs Nats`, and rotate the token again"
        raise SupervisorError(f"{what} within {seconds:g} s", remedy) from error


# Takes orders to replace the token of NATS (`dynamo rotate-token`), one at a time.

NATS_OF_OTHERS = SupervisorError(
    "the NATS server was not started by this server", "replace the token there, and start the server anew with it"
)
ON_NODES = SupervisorError(
    "processes on other nodes have the token as well, and take no new one while they run",
    "stop the server and serve again, which makes another token",
)
_DEADLINE_S = 60.0


@dataclass
class TokenOrders:
    """Carries out orders, also when whoever has ordered is gone. `rotation`: None where the token cannot be replaced,
    as `why_not` says."""

    rotation: TokenRotation | None
    tasks: TaskGuard
    record: Callable[[Event], None]
    report: Report
    clock: Callable[[], float] = time.monotonic
    why_not: SupervisorError = NATS_OF_OTHERS
    _under_way: asyncio.Task[Rotated | DynamoError] | None = field(default=None, init=False)

    async def rotate(self, _: Call) -> dict[str, Any]:
        """Replace the token. Raises SupervisorError, StateError, BusError."""
        if self.rotation is None:
            raise self.why_not
        if self._under_way is not None and not self._under_way.done():
            raise SupervisorError("the token is being replaced already", "try again in a moment")
        self._under_way = order = self.tasks.spawn("token of NATS", self._carry_out(self.rotation))
        await asyncio.wait({order}, timeout=_DEADLINE_S)
        if not order.done():
            raise SupervisorError(
                f"the server has not replaced the token within {_DEADLINE_S:g} s", "see `dynamo events --kind secret`"
            )
        if order.cancelled():
            raise SupervisorError("the server is stopping", "`dynamo ls` shows whether it has ended")
        outcome = order.result()
        if isinstance(outcome, DynamoError):
            raise outcome
        return {"processes": outcome.processes, "disconnected": outcome.disconnected}

    async def _carry_out(self, rotation: TokenRotation) -> Rotated | DynamoError:
        began = self.clock()
        try:
            rotated = await rotation.rotate()
        except DynamoError as error:
            self._happened("the token of NATS was not replaced", str(error))
            return error
        why = f"{rotated.processes} processes took the new one within {self.clock() - began:.1f} s"
        if rotated.disconnected:
            why += f"; disconnected: {', '.join(map(short_watcher, rotated.disconnected))}"
        self._happened("the token of NATS was replaced", why)
        return rotated

    def _happened(self, what: str, why: str) -> None:
        self.record(Event("secret", what, why))
        self.report.step(f"{what}: {why}")
