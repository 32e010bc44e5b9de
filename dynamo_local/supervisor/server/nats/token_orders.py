"""Takes orders to replace the token of NATS (`dynamo rotate-token`), one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from dynamo_local.control.operations import Call
from dynamo_local.core.errors import DynamoError, SupervisorError
from dynamo_local.core.messages.events import Event
from dynamo_local.core.names import short_watcher
from dynamo_local.supervisor.server.nats.rotation import Rotated, TokenRotation
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import TaskGuard

NATS_OF_OTHERS = SupervisorError(
    "the NATS server was not started by this server", "replace the token there, and start the server anew with it"
)
ON_NODES = SupervisorError(
    "processes on other nodes have the token as well, and take no new one while they run",
    "stop the server and serve again, which makes another token",
)
_DEADLINE_S = 60.0


class TokenOrders:
    """Carries out orders, also when whoever has ordered is gone. `rotation`: None where the token cannot be replaced,
    as `why_not` says."""

    def __init__(
        self,
        rotation: TokenRotation | None,
        tasks: TaskGuard,
        record: Callable[[Event], None],
        report: Report,
        clock: Callable[[], float] = time.monotonic,
        why_not: SupervisorError = NATS_OF_OTHERS,
    ) -> None:
        self._rotation = rotation
        self._tasks = tasks
        self._record = record
        self._report = report
        self._clock = clock
        self._why_not = why_not
        self._under_way: asyncio.Task[Rotated | DynamoError] | None = None

    async def rotate(self, _: Call) -> dict[str, Any]:
        """Replace the token. Raises SupervisorError, StateError, BusError."""
        if self._rotation is None:
            raise self._why_not
        if self._under_way is not None and not self._under_way.done():
            raise SupervisorError("the token is being replaced already", "try again in a moment")
        self._under_way = order = self._tasks.spawn("token of NATS", self._carry_out(self._rotation))
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
        began = self._clock()
        try:
            rotated = await rotation.rotate()
        except DynamoError as error:
            self._happened("the token of NATS was not replaced", str(error))
            return error
        why = f"{rotated.processes} processes took the new one within {self._clock() - began:.1f} s"
        if rotated.disconnected:
            why += f"; disconnected: {', '.join(map(short_watcher, rotated.disconnected))}"
        self._happened("the token of NATS was replaced", why)
        return rotated

    def _happened(self, what: str, why: str) -> None:
        self._record(Event("secret", what, why))
        self._report.step(f"{what}: {why}")
