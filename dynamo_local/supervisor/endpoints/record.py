"""What the controller has done to endpoints, told to all: the event log, the terminal, the planner, and commands."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from dynamo_local.bus.nats import Bus
from dynamo_local.core.endpoints.status import CHANGES, noted
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.endpoints import EndpointHistory
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.endpoints.board import BoardWriter
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce

_MOST_WAITING = 1000
"""Events that are kept while the bus cannot be reached."""
_AGAIN_S = 1.0


@dataclass
class EndpointRecord:
    """The record of one server's endpoints. `log`: writes an event into the event log."""

    log: Callable[[Event], None]
    report: Report
    bus: Bus
    subjects: Subjects
    board: BoardWriter
    wall_clock: Callable[[], float] = time.time
    _histories: dict[str, EndpointHistory] = field(default_factory=dict, init=False)
    _to_tell: deque[Event] = field(default_factory=lambda: deque(maxlen=_MOST_WAITING), init=False)
    _more: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def note(self, event: Event) -> None:
        """Note an event of an endpoint."""
        event = replace(event, time=round(self.wall_clock(), 3))
        self.log(event)
        self.report.step(f"endpoint {event.endpoint}  {event.what}" + (f": {event.why}" if event.why else ""))
        if event.kind in CHANGES:
            self._histories[event.endpoint] = noted(self.of(event.endpoint), event)
            self._to_tell.append(event)
            self._more.set()
        self.board.touch()

    def happened(self, endpoint: str, what: str, why: str = "") -> None:
        """Note what was done to an endpoint, or has become of it."""
        self.note(Event("endpoint", what, why, endpoint=endpoint))

    def of(self, endpoint: str) -> EndpointHistory:
        """What has become of the endpoint."""
        return self._histories.get(endpoint, EndpointHistory())

    def forget(self, endpoint: str) -> None:
        """Forget an endpoint that was deleted."""
        self._histories.pop(endpoint, None)

    async def run(self) -> None:
        """Tell the planner, in order, until cancelled."""
        failure = ReportOnce(self.report)
        while True:
            await self._more.wait()
            self._more.clear()
            while self._to_tell:
                event = self._to_tell.popleft()
                try:
                    await self.bus.send(self.subjects.endpoint_changes, event)
                except BusError as error:
                    self._to_tell.appendleft(event)
                    failure.note(f"the planner hears later of what was done to endpoints: {error}")
                    await asyncio.sleep(_AGAIN_S)
                else:
                    failure.note("")
