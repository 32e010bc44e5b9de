"""The place of a node server, which is asked over the bus."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from dynamo_local.bus.nats import Bus, Subscription
from dynamo_local.core.codec import Message
from dynamo_local.core.errors import (
    BusError,
    ConfigError,
    DecodeError,
    DeviceError,
    DynamoError,
    NodeStartError,
    SilentNodeError,
    StateError,
    SupervisorError,
    UsageError,
    one_line,
)
from dynamo_local.core.names import Watcher, check_watcher
from dynamo_local.supervisor.places.port import LogPart, Need, Place, Places, Slot, Status
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.tasks import TaskGuard

# Messages between those who decide what runs and the places where it runs (port.py).

MOST_LOG_LINES = 1000
MOST_LOG_BYTES = 256 * 1024

_ERRORS = (DeviceError, StateError, ConfigError, UsageError, SilentNodeError, NodeStartError, SupervisorError)
"""The classes that are told apart at the other end. The first that fits is named."""

_Lines = Annotated[int, msgspec.Meta(ge=1, le=MOST_LOG_LINES)]


class PlacesQuestion(Message, frozen=True, tag="places"):
    """Question for the places that answer."""


class ReserveOrder(Message, frozen=True, tag="reserve"):
    """Order to reserve what a watcher's process needs."""

    watcher: Watcher
    need: Need

    def __post_init__(self) -> None:
        check_watcher(self.watcher)


class StartOrder(Message, frozen=True, tag="start"):
    """Order to start a process on what is reserved. A node server plans command and environment itself."""

    plan: WatcherPlan


class EndOrder(Message, frozen=True, tag="end"):
    """Order to end a watcher's process, and to kill it after so many seconds."""

    watcher: str
    deadline_s: float


class ReleaseOrder(Message, frozen=True, tag="release"):
    """Order to free what is reserved for a watcher."""

    watcher: str


class StatusesQuestion(Message, frozen=True, tag="statuses"):
    """Question for the status of every watcher."""


class ErrorQuestion(Message, frozen=True, tag="error"):
    """Question for the error in which a watcher's last process ended."""

    watcher: str


class LogQuestion(Message, frozen=True, omit_defaults=True, tag="log"):
    """Question for the last lines of a watcher's log, of those `after` that offset in bytes if one is given."""

    watcher: str
    lines: _Lines
    after: Annotated[int, msgspec.Meta(ge=0)] | None = None


class GraphOrder(Message, frozen=True, tag="graph"):
    """Tells a node server the resolved graph, as JSON, of an endpoint's revision whose workers it is about to start."""

    revision: str
    graph: bytes


PlacesRequest = (
    PlacesQuestion
    | ReserveOrder
    | StartOrder
    | EndOrder
    | ReleaseOrder
    | StatusesQuestion
    | ErrorQuestion
    | LogQuestion
    | GraphOrder
)


class PlacesAnswer(Message, frozen=True, tag="places"):
    """The places that answer, by node."""

    places: Mapping[str, Place]


class StatusesAnswer(Message, frozen=True, tag="statuses"):
    """Status of every watcher."""

    statuses: Mapping[str, Status]


class ErrorAnswer(Message, frozen=True, tag="error"):
    """The error in which a watcher's last process ended."""

    error: str | None


class Done(Message, frozen=True, tag="done"):
    """The order is carried out."""


class Refused(Message, frozen=True, omit_defaults=True, tag="refused"):
    """The order was not carried out. `error`: name of the class in the tree of errors."""

    error: str
    cause: str
    remedy: str | None = None


PlacesReply = PlacesAnswer | Slot | StatusesAnswer | ErrorAnswer | LogPart | Done | Refused


def refusal(error: DynamoError) -> Refused:
    """An error as a message."""
    kind = next((kind for kind in _ERRORS if isinstance(error, kind)), SupervisorError)
    return Refused(kind.__name__, error.cause, error.remedy)


def error_of(refused: Refused) -> DynamoError:
    """Inverse of `refusal`."""
    kinds = {kind.__name__: kind for kind in _ERRORS}
    return kinds.get(refused.error, SupervisorError)(refused.cause, refused.remedy)


class HeadBeat(Message, frozen=True):
    """Tells node servers that the server that has started them lives. `server`: its id, a new one at each start."""

    server: str


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

    async def reserve(self, watcher: Watcher, need: Need) -> Slot:
        return await self._ask(ReserveOrder(watcher, need), Slot, self.slow_within_s)

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

    async def _ask(self, request: PlacesRequest, kind: type[_M], within_s: float) -> _M:
        try:
            answer: PlacesReply = await self.bus.ask(self.subject, request, PlacesReply, timeout_s=within_s)
        except (BusError, DecodeError) as error:
            raise SilentNodeError(
                f"{self.who} does not answer: {error}", "what runs there is unknown until it does"
            ) from error
        if isinstance(answer, Refused):
            raise error_of(answer)
        if not isinstance(answer, kind):
            raise SilentNodeError(f"{self.who} does not answer as asked")
        return answer


# Answers the orders that come to a node server over the bus.

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlacesService:
    """Serves places on a subject. `learn(revision, graph)`: takes the graph of an endpoint's revision."""

    places: Places
    tasks: TaskGuard
    learn: Callable[[str, bytes], Awaitable[None]]

    async def serve(self, bus: Bus, subject: str) -> Subscription:
        """Answer until the bus closes or the subscription ends. Each order is carried out in a task of its own."""
        return await bus.serve(subject, PlacesRequest, self._answered, tasks=self.tasks)

    async def _answered(self, request: PlacesRequest) -> PlacesReply:
        try:
            return await self._carried_out(request)
        except DynamoError as error:
            return refusal(error)
        except Exception as error:  # noqa: BLE001 - an order that fails in a new way is no reason to end all that runs
            _log.exception("an order has failed: %s", type(request).__name__)
            return refusal(SupervisorError(f"{type(error).__name__}: {one_line(error)}", "see the log"))

    async def _carried_out(self, request: PlacesRequest) -> PlacesReply:
        match request:
            case PlacesQuestion():
                return PlacesAnswer(await self.places.places())
            case StatusesQuestion():
                return StatusesAnswer(await self.places.statuses())
            case ReserveOrder():
                return await self.places.reserve(request.watcher, request.need)
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
