"""Answers the orders that come to a node server over the bus."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.subscriptions import Answer, Subscription
from dynamo_local.core.errors import DynamoError, SupervisorError, one_line
from dynamo_local.supervisor.places.messages import (
    MOST_LOG_BYTES,
    Done,
    EndOrder,
    ErrorAnswer,
    ErrorQuestion,
    GraphOrder,
    LogQuestion,
    PlacesAnswer,
    PlacesQuestion,
    PlacesRequest,
    ReleaseOrder,
    Reserved,
    ReserveOrder,
    StartOrder,
    StatusesAnswer,
    StatusesQuestion,
    refusal,
)
from dynamo_local.supervisor.places.port import LogPart, Places
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlacesService:
    """Serves places on a subject. `learn(revision, graph)`: takes the graph of an endpoint's revision."""

    places: Places
    tasks: TaskGuard
    learn: Callable[[str, bytes], Awaitable[None]]

    async def serve(self, bus: Bus, subject: str) -> Subscription:
        """Answer until the bus closes or the subscription ends. Each order is carried out in a task of its own."""

        async def on_request(request: PlacesRequest, answer: Answer) -> None:
            self.tasks.spawn(f"order {type(request).__name__}", self._answered(request, answer))

        return await bus.serve(subject, PlacesRequest, on_request)

    async def _answered(self, request: PlacesRequest, answer: Answer) -> None:
        try:
            reply = await self._carried_out(request)
        except DynamoError as error:
            reply = refusal(error)
        except Exception as error:  # noqa: BLE001 - an order that fails in a new way is no reason to end all that runs
            _log.exception("an order has failed: %s", type(request).__name__)
            reply = refusal(SupervisorError(f"{type(error).__name__}: {one_line(error)}", "see the log"))
        await answer.send(reply)

    async def _carried_out(self, request: PlacesRequest) -> msgspec.Struct:
        match request:
            case PlacesQuestion():
                return PlacesAnswer(await self.places.places())
            case StatusesQuestion():
                return StatusesAnswer(await self.places.statuses())
            case ReserveOrder():
                return Reserved(await self.places.reserve(request.watcher, request.need))
            case ErrorQuestion(watcher=watcher):
                return ErrorAnswer(await self.places.last_error(watcher))
            case LogQuestion(watcher=watcher, lines=lines, after=after):
                part = await self.places.log(watcher, lines, after)
                return LogPart(_bounded(part.lines), part.end)
            case StartOrder(plan=plan):
                await self.places.start(plan)
            case EndOrder(watcher=watcher, deadline_s=deadline_s):
                await self.places.end(watcher, deadline_s)
            case ReleaseOrder(watcher=watcher):
                await self.places.release(watcher)
            case GraphOrder(revision=revision, graph=graph):
                await self.learn(revision, graph)
        return Done()


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    """The last of the lines that fit into a message."""
    kept: list[str] = []
    room = MOST_LOG_BYTES
    for line in reversed(lines):
        room -= len(line.encode(errors="replace")) + 1
        if room < 0:
            break
        kept.append(line)
    return tuple(reversed(kept))
