"""Messages between those who decide what runs and the places where it runs (supervisor/places).

Each node server answers them for its node.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from dynamo_local.core.codec import VERSION

MOST_LOG_LINES = 1000
MOST_LOG_BYTES = 256 * 1024

_Lines = Annotated[int, msgspec.Meta(ge=1, le=MOST_LOG_LINES)]


class DeviceRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device of a node (state.devices.allocation.Device)."""

    id: int
    kind: Literal["gpu", "cpu-slot"]
    name: str
    cores: tuple[int, ...] = ()
    uuid: str = ""


class InventoryRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """The devices of a node (state.devices.allocation.Inventory)."""

    kind: Literal["gpu", "cpu-slot"]
    devices: tuple[DeviceRow, ...]
    exclusive: bool = True
    gone: dict[int, str] = {}


class ReservationRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Devices of a node, by their ids there, or a share of one, that are reserved for a watcher."""

    watcher: str
    node: str
    devices: tuple[int, ...]
    share: float = 1.0


class PlaceRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node, with what is reserved there and not claimed. `given_up`: watchers whose processes are not started again,
    each with the reason."""

    node: str
    inventory: InventoryRow
    reservations: tuple[ReservationRow, ...]
    given_up: dict[str, str] = {}


class PlacesQuestion(msgspec.Struct, frozen=True, tag="places"):
    """Question for the places that answer."""

    v: int = VERSION


class ReserveOrder(msgspec.Struct, frozen=True, omit_defaults=True, tag="reserve"):
    """Order to reserve that many devices, or a share of one, for a watcher. `on`: ids of those that were chosen.
    `node`: the only one that will do."""

    watcher: str
    role: str
    devices: int
    share: float = 1.0
    virtual: bool = False
    on: tuple[int, ...] | None = None
    node: str = ""
    v: int = VERSION


class StartOrder(msgspec.Struct, frozen=True, omit_defaults=True, tag="start"):
    """Order to start a process on what is reserved. A node server plans command and environment itself."""

    reservation: ReservationRow
    role: str
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = {}
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
    """The places that answer."""

    places: tuple[PlaceRow, ...]
    v: int = VERSION


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """What is reserved now."""

    reservation: ReservationRow
    v: int = VERSION


class StatusesAnswer(msgspec.Struct, frozen=True, tag="statuses"):
    """Status of every watcher."""

    statuses: dict[str, Literal["active", "stopped", "unknown"]]
    v: int = VERSION


class LinesAnswer(msgspec.Struct, frozen=True, omit_defaults=True, tag="lines"):
    """Lines of a log: the error, or none; or the last ones. `end`: the offset after them, in bytes."""

    lines: tuple[str, ...]
    end: int = 0
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


PlacesReply = PlacesAnswer | Reserved | StatusesAnswer | LinesAnswer | Done | Refused


class HeadBeat(msgspec.Struct, frozen=True):
    """Tells node servers that the server that has started them lives. `server`: its id, a new one at each start."""

    server: str
    v: int = VERSION
