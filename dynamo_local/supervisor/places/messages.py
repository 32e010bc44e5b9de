"""Messages between those who decide what runs and the places where it runs (port.py).

Each node server answers them for its node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from dynamo_local.core.codec import VERSION
from dynamo_local.core.errors import (
    ConfigError,
    DeviceError,
    DynamoError,
    NodeStartError,
    SilentNodeError,
    StateError,
    SupervisorError,
    UsageError,
)
from dynamo_local.core.names import Watcher, check_watcher
from dynamo_local.supervisor.places.port import LogPart, Need, Place, Reservation, Status
from dynamo_local.supervisor.server.launch.templates import WatcherPlan

MOST_LOG_LINES = 1000
MOST_LOG_BYTES = 256 * 1024

_ERRORS = (DeviceError, StateError, ConfigError, UsageError, SilentNodeError, NodeStartError, SupervisorError)
"""The classes that are told apart at the other end. The first that fits is named."""

_Lines = Annotated[int, msgspec.Meta(ge=1, le=MOST_LOG_LINES)]


class PlacesQuestion(msgspec.Struct, frozen=True, tag="places"):
    """Question for the places that answer."""

    v: int = VERSION


class ReserveOrder(msgspec.Struct, frozen=True, tag="reserve"):
    """Order to reserve what a watcher's process needs."""

    watcher: Watcher
    need: Need
    v: int = VERSION

    def __post_init__(self) -> None:
        check_watcher(self.watcher)


class StartOrder(msgspec.Struct, frozen=True, tag="start"):
    """Order to start a process on what is reserved. A node server plans command and environment itself."""

    plan: WatcherPlan
    v: int = VERSION


class EndOrder(msgspec.Struct, frozen=True, tag="end"):
    """Order to end a watcher's process, and to kill it after so many seconds."""

    watcher: str
    deadline_s: float
    v: int = VERSION


class ReleaseOrder(msgspec.Struct, frozen=True, tag="release"):
    """Order to free what is reserved for a watcher."""

    watcher: str
    v: int = VERSION


class StatusesQuestion(msgspec.Struct, frozen=True, tag="statuses"):
    """Question for the status of every watcher."""

    v: int = VERSION


class ErrorQuestion(msgspec.Struct, frozen=True, tag="error"):
    """Question for the error in which a watcher's last process ended."""

    watcher: str
    v: int = VERSION


class LogQuestion(msgspec.Struct, frozen=True, omit_defaults=True, tag="log"):
    """Question for the last lines of a watcher's log, of those `after` that offset in bytes if one is given."""

    watcher: str
    lines: _Lines
    after: Annotated[int, msgspec.Meta(ge=0)] | None = None
    v: int = VERSION


class GraphOrder(msgspec.Struct, frozen=True, tag="graph"):
    """Tells a node server the resolved graph, as JSON, of an endpoint's revision whose workers it is about to start."""

    revision: str
    graph: bytes
    v: int = VERSION


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


class PlacesAnswer(msgspec.Struct, frozen=True, tag="places"):
    """The places that answer, by node."""

    places: Mapping[str, Place]
    v: int = VERSION


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """What is reserved now."""

    reservation: Reservation
    v: int = VERSION


class StatusesAnswer(msgspec.Struct, frozen=True, tag="statuses"):
    """Status of every watcher."""

    statuses: Mapping[str, Status]
    v: int = VERSION


class ErrorAnswer(msgspec.Struct, frozen=True, tag="error"):
    """The error in which a watcher's last process ended."""

    error: str | None
    v: int = VERSION


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The order is carried out."""

    v: int = VERSION


class Refused(msgspec.Struct, frozen=True, omit_defaults=True, tag="refused"):
    """The order was not carried out. `error`: name of the class in the tree of errors."""

    error: str
    cause: str
    remedy: str | None = None
    v: int = VERSION


PlacesReply = PlacesAnswer | Reserved | StatusesAnswer | ErrorAnswer | LogPart | Done | Refused


def refusal(error: DynamoError) -> Refused:
    """An error as a message."""
    kind = next((kind for kind in _ERRORS if isinstance(error, kind)), SupervisorError)
    return Refused(kind.__name__, error.cause, error.remedy)


def error_of(refused: Refused) -> DynamoError:
    """Inverse of `refusal`."""
    kinds = {kind.__name__: kind for kind in _ERRORS}
    return kinds.get(refused.error, SupervisorError)(refused.cause, refused.remedy)


class HeadBeat(msgspec.Struct, frozen=True):
    """Tells node servers that the server that has started them lives. `server`: its id, a new one at each start."""

    server: str
    v: int = VERSION
