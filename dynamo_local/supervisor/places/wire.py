"""Places, reservations, plans and errors as messages (core/messages/places.py), and back."""

from __future__ import annotations

from dynamo_local.core import errors
from dynamo_local.core.errors import ConfigError, DecodeError, DeviceError, DynamoError, StateError, SupervisorError
from dynamo_local.core.messages.places import (
    DeviceRow,
    InventoryRow,
    PlaceRow,
    Refused,
    ReservationRow,
    ReserveOrder,
    StartOrder,
)
from dynamo_local.core.names import Watcher, check_node, parse_watcher
from dynamo_local.supervisor.places.port import Need, Place, Reservation
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.devices.allocation import Device, Inventory

_ERRORS = (
    *(DeviceError, StateError, ConfigError, errors.UsageError),
    *(errors.SilentNodeError, errors.NodeStartError, SupervisorError),
)
"""The classes that are told apart at the other end. The first that fits is named."""


def row_of_place(place: Place) -> PlaceRow:
    """A place as a message."""
    return PlaceRow(
        place.node,
        row_of_inventory(place.inventory),
        tuple(map(row_of_reservation, place.reservations.values())),
        dict(place.given_up),
    )


def place_of(row: PlaceRow) -> Place:
    """Inverse of `row_of_place`. Raises DecodeError for what makes no sense."""
    try:
        check_node(row.node)
        inventory = Inventory(
            row.inventory.kind,
            tuple(Device(one.id, one.kind, one.name, one.cores, one.uuid) for one in row.inventory.devices),
            row.inventory.exclusive,
            row.inventory.gone,
        )
    except (ConfigError, DeviceError) as error:
        raise DecodeError(f"not a place: {error}") from error
    return Place(row.node, inventory, {one.watcher: reservation_of(one) for one in row.reservations}, row.given_up)


def row_of_inventory(inventory: Inventory) -> InventoryRow:
    """Devices as a message."""
    devices = tuple(DeviceRow(one.id, one.kind, one.name, one.cores, one.uuid) for one in inventory.devices)
    return InventoryRow(inventory.kind, devices, inventory.exclusive, dict(inventory.gone))


def row_of_reservation(reservation: Reservation) -> ReservationRow:
    """A reservation as a message."""
    return ReservationRow(str(reservation.watcher), reservation.node, reservation.devices, reservation.share)


def reservation_of(row: ReservationRow) -> Reservation:
    """Inverse of `row_of_reservation`. Raises DecodeError for what makes no sense."""
    return Reservation(watcher_of(row.watcher), row.node, row.devices, row.share)


def order_to_reserve(watcher: Watcher, need: Need) -> ReserveOrder:
    """A need as a message."""
    return ReserveOrder(str(watcher), need.role, need.devices, need.share, need.virtual, need.on, need.node)


def need_of(order: ReserveOrder) -> Need:
    """Inverse of `order_to_reserve`, without the watcher."""
    return Need(order.role, order.devices, order.share, order.virtual, order.on, order.node)


def order_to_start(reservation: Reservation, plan: WatcherPlan) -> StartOrder:
    """A plan as a message."""
    return StartOrder(row_of_reservation(reservation), plan.role, plan.argv, dict(plan.environment))


def plan_of(order: StartOrder) -> WatcherPlan:
    """Inverse of `order_to_start`, without the reservation."""
    reservation = reservation_of(order.reservation)
    return WatcherPlan(
        *(reservation.watcher, order.role, order.argv, order.environment, reservation.devices, reservation.share),
        node=reservation.node,
    )


def watcher_of(name: str) -> Watcher:
    """The watcher of that name. Raises DecodeError for anything else."""
    try:
        return parse_watcher(name)
    except ConfigError as error:
        raise DecodeError(str(error)) from error


def refusal(error: DynamoError) -> Refused:
    """An error as a message."""
    kind = next((kind for kind in _ERRORS if isinstance(error, kind)), SupervisorError)
    return Refused(kind.__name__, error.cause, error.remedy)


def error_of(refused: Refused) -> DynamoError:
    """Inverse of `refusal`."""
    kinds = {kind.__name__: kind for kind in _ERRORS}
    return kinds.get(refused.error, SupervisorError)(refused.cause, refused.remedy)
