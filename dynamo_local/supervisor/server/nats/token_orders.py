"""Takes orders to replace the token of NATS (`dynamo rotate-token`), one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.errors import DynamoError, SupervisorError, UsageError
from dynamo_local.core.messages.events import Event
from dynamo_local.core.messages.rotation import RotateToken, RotationAnswer
from dynamo_local.core.names import short_watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.server.nats.rotation import TokenRotation
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import TaskGuard

NATS_OF_OTHERS = UsageError(
    "the NATS server was not started by this server", "replace the token there, and start the server anew with it"
)
ON_NODES = UsageError(
    "processes on other nodes have the token as well, and take no new one while they run",
    "stop the server and serve again, which makes another token",
)


class TokenOrders:
    """Answers at once how far an order is, and carries it out meanwhile. `rotation`: None where the token
    cannot be replaced, as `why_not` says."""

    def __init__(
        self,
        rotation: TokenRotation | None,
        tasks: TaskGuard,
        record: Callable[[Event], None],
        report: Report,
        clock: Callable[[], float] = time.monotonic,
        why_not: UsageError = NATS_OF_OTHERS,
    ) -> None:
        self._rotation = rotation
        self._tasks = tasks
        self._record = record
        self._report = report
        self._clock = clock
        self._why_not = why_not
        self._order = ""
        self._answer = RotationAnswer(finished=True)

    async def start(self, bus: Bus, subjects: Subjects) -> None:
        """Listen to orders."""

        async def on_order(order: RotateToken, answer: Answer) -> None:
            await answer.send(self.take(order))

        await bus.serve(subjects.token_orders, RotateToken, on_order)

    def take(self, order: RotateToken) -> RotationAnswer:
        """Begin to carry out an order, or return how far it is."""
        if self._rotation is None:
            return _refusal(self._why_not)
        if order.order == self._order:
            return self._answer
        if not (self._answer.finished or self._answer.refused):
            return _refusal(SupervisorError("the token is being replaced already", "try again in a moment"))
        self._order, self._answer = order.order, RotationAnswer()
        self._tasks.spawn("token of NATS", self._carry_out(self._rotation))
        return self._answer

    async def _carry_out(self, rotation: TokenRotation) -> None:
        began = self._clock()
        try:
            rotated = await rotation.rotate()
        except DynamoError as error:
            self._answer = _refusal(error)
            self._happened("the token of NATS was not replaced", str(error))
            return
        self._answer = RotationAnswer(True, rotated.processes, rotated.disconnected)
        why = f"{rotated.processes} processes took the new one within {self._clock() - began:.1f} s"
        if rotated.disconnected:
            why += f"; disconnected: {', '.join(map(short_watcher, rotated.disconnected))}"
        self._happened("the token of NATS was replaced", why)

    def _happened(self, what: str, why: str) -> None:
        self._record(Event("secret", what, why))
        self._report.step(f"{what}: {why}")


def _refusal(error: DynamoError) -> RotationAnswer:
    return RotationAnswer(refused=error.cause, remedy=error.remedy or "")
