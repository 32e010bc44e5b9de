"""The place of a node server, which is asked over the bus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError, SilentNodeError
from dynamo_local.core.names import Watcher
from dynamo_local.supervisor.places.messages import (
    MOST_LOG_LINES,
    Done,
    EndOrder,
    ErrorAnswer,
    ErrorQuestion,
    GraphOrder,
    LogQuestion,
    PlacesAnswer,
    PlacesQuestion,
    PlacesReply,
    Refused,
    ReleaseOrder,
    Reserved,
    ReserveOrder,
    StartOrder,
    StatusesAnswer,
    StatusesQuestion,
    error_of,
)
from dynamo_local.supervisor.places.port import LogPart, Need, Place, Reservation, Status
from dynamo_local.supervisor.server.launch.templates import WatcherPlan

_M = TypeVar("_M")

_KILLED_WITHIN_S = 15.0
"""What the end of a process may take beyond its deadline: it is killed then, and frees its memory."""


@dataclass(frozen=True)
class FarPlaces:
    """The place behind a subject of the bus (port.Places). `who`: answers there, in words. `within_s`: for an answer.
    `slow_within_s`: for one to an order that starts something.

    What does not answer raises SilentNodeError, a SupervisorError."""

    bus: Bus
    subject: str
    who: str
    within_s: float = 5.0
    slow_within_s: float = 30.0

    async def places(self) -> Mapping[str, Place]:
        return (await self._ask(PlacesQuestion(), PlacesAnswer, self.within_s)).places

    async def reserve(self, watcher: Watcher, need: Need) -> Reservation:
        return (await self._ask(ReserveOrder(watcher, need), Reserved, self.slow_within_s)).reservation

    async def start(self, plan: WatcherPlan) -> None:
        await self._ask(StartOrder(plan), Done, self.slow_within_s)

    async def end(self, watcher: str, deadline_s: float) -> None:
        within_s = self.slow_within_s + deadline_s + _KILLED_WITHIN_S
        await self._ask(EndOrder(watcher, deadline_s), Done, within_s)

    async def release(self, watcher: str) -> None:
        await self._ask(ReleaseOrder(watcher), Done, self.slow_within_s)

    async def statuses(self) -> Mapping[str, Status]:
        return (await self._ask(StatusesQuestion(), StatusesAnswer, self.within_s)).statuses

    async def last_error(self, watcher: str) -> str | None:
        return (await self._ask(ErrorQuestion(watcher), ErrorAnswer, self.within_s)).error

    async def log(self, watcher: str, lines: int, after: int | None = None) -> LogPart:
        question = LogQuestion(watcher, max(1, min(lines, MOST_LOG_LINES)), after)
        return await self._ask(question, LogPart, self.within_s)

    async def learn(self, revision: str, graph: bytes) -> None:
        """Tell the graph of an endpoint's revision, as JSON."""
        await self._ask(GraphOrder(revision, graph), Done, self.slow_within_s)

    async def _ask(self, request: msgspec.Struct, kind: type[_M], within_s: float) -> _M:
        try:
            data = await self.bus.request(self.subject, codec.encode(request), timeout_s=within_s)
            answer = codec.decode(data, PlacesReply)
        except (BusError, DecodeError) as error:
            raise SilentNodeError(
                f"{self.who} does not answer: {error}", "what runs there is unknown until it does"
            ) from error
        if isinstance(answer, Refused):
            raise error_of(answer)
        if not isinstance(answer, kind):
            raise SilentNodeError(f"{self.who} does not answer as asked")
        return answer
