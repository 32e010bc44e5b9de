"""The endpoints of a frontend as what it has woken: what the board and its workers say of them, and the order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamo_local.bus.nats import Bus
from dynamo_local.core.http.waiting.waking import Idle, idle_as, is_waking, may_be_tried
from dynamo_local.core.messages.endpoints import EndpointRefusal, EndpointsAnswer, EndpointView, WakeEndpoint
from dynamo_local.core.subjects import Subjects

ANSWER_S = 2.0
"""Time for the server to answer. It answers before the endpoint is awake."""


@dataclass(frozen=True)
class WorkersHere:
    """What this frontend sees of an endpoint's workers. `parked`: one of them is. `ready`: one of them is, or the
    frontend cannot serve the endpoint anyway. `lacking`: a request that had gone on has no worker any more."""

    parked: bool = False
    ready: bool = False
    lacking: bool = False


class ServedEndpoint:
    """An endpoint of the board. Implements `components.frontend.http.waking.WakeableEndpoint`."""

    def __init__(
        self,
        name: str,
        bus: Bus,
        subjects: Subjects,
        view: Callable[[], EndpointView | None],
        workers: Callable[[], WorkersHere],
    ) -> None:
        """`view` and `workers` return what is known of the endpoint now."""
        self.name = name
        self._bus = bus
        self._subject = subjects.endpoints
        self._view = view
        self._workers = workers

    def idle(self) -> Idle | None:
        """How the endpoint is idle; None: it is not, or could not be served if it were woken."""
        workers = self._workers()
        return None if workers.ready else idle_as(self._view(), parked=workers.parked)

    def lacks_workers(self) -> bool:
        """Whether a request that was not held, or is not any more, waits for a worker."""
        return self._workers().lacking

    def is_waking(self) -> bool:
        """Whether it comes up for those who ask for it."""
        return not self._workers().ready and is_waking(self._view())

    def may_be_tried(self) -> bool:
        """Whether it has failed to wake, and may be tried again."""
        return not self._workers().ready and may_be_tried(self._view())

    async def wake(self) -> EndpointRefusal | None:
        """Ask the server to wake it. Returns its refusal. Raises BusError, DecodeError."""
        order = WakeEndpoint(self.name, asked=True)
        return (await self._bus.ask(self._subject, order, EndpointsAnswer, timeout_s=ANSWER_S)).refused
