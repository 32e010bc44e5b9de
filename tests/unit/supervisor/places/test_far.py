"""What places are told and tell is checked where it is decoded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.codec import Message
from dynamo_local.core.errors import DecodeError
from dynamo_local.core.names import Watcher
from dynamo_local.supervisor.places.far import (
    LogQuestion,
    PlacesAnswer,
    PlacesQuestion,
    PlacesReply,
    PlacesRequest,
    PlacesService,
    Refused,
    ReserveOrder,
    StartOrder,
)
from dynamo_local.supervisor.places.port import Need, Place, Places, Slot
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.tasks import TaskGuard
from state.devices.allocation import Device, Inventory, cpu_slots

WATCHER = Watcher("dynamo", "VllmWorker", 2, "chat@7")
NEED = Need("decode", 2, on=(0, 2))
GPUS = Inventory("gpu", (Device(0, "gpu", "A", uuid="u"), Device(2, "gpu", "A", uuid="v")), gone={2: "it fell off"})
PLACES = {
    "local": Place("local", cpu_slots(range(4), 2), frozenset({str(WATCHER)})),
    "n-1.example": Place("n-1.example", GPUS, given_up={"dynamo_chat@7_VllmWorker": "it dies"}),
}
PLAN = WatcherPlan(WATCHER, "decode", ("run", "it"), {"KEEP": "me"}, (1,), 0.5, "n-1.example")


@pytest.mark.parametrize("message", [ReserveOrder(WATCHER, NEED), StartOrder(PLAN), PlacesAnswer(PLACES)])
def test_what_is_sent_arrives(message: Message) -> None:
    kind = PlacesReply if isinstance(message, PlacesAnswer) else PlacesRequest
    assert codec.decode(codec.encode(message), kind) == message


WRONG_INVENTORY = {"kind": "cpu-slot", "devices": [{"id": id, "kind": "cpu-slot", "name": ""} for id in (1, 0)]}


def tampered(message: Message, path: str, value: object) -> bytes:
    plain = msgspec.to_builtins(message)
    *before, last = path.split("/")
    part = plain
    for key in before:
        part = part[key]
    part[last] = value
    return msgspec.msgpack.encode((codec.VERSION, plain))


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (ReserveOrder(WATCHER, NEED), "watcher/namespace", "../else"),
        (ReserveOrder(WATCHER, NEED), "watcher/service", "worker"),
        (ReserveOrder(WATCHER, NEED), "watcher/service", "Worker\n"),
        (ReserveOrder(WATCHER, NEED), "watcher/index", -1),
        (StartOrder(PLAN), "plan/watcher/revision", "chat@0"),
        (LogQuestion("dynamo_VllmWorker", 1), "lines", 0),
        (LogQuestion("dynamo_VllmWorker", 1), "after", -1),
        (Slot("n-1.example", (1,)), "node", "a node"),
        (PlacesAnswer(PLACES), "places/local/node", ""),
        (PlacesAnswer(PLACES), "places/local/inventory", WRONG_INVENTORY),
    ],
)
def test_what_makes_no_sense_is_no_message(message: Message, path: str, value: object) -> None:
    kind = PlacesReply if isinstance(message, PlacesAnswer | Slot) else PlacesRequest
    codec.decode(codec.encode(message), kind)
    with pytest.raises(DecodeError):
        codec.decode(tampered(message, path, value), kind)


# Orders that come over the bus.


class BrokenPlaces:
    async def places(self) -> None:
        raise KeyError("nobody has thought of this")


class Asked:
    """A bus that asks one question, and its answer."""

    def __init__(self) -> None:
        self.answers: list[Message] = []

    async def serve(
        self, subject: str, kind: object, handler: Callable[[Message], Awaitable[Message]], *, tasks: TaskGuard
    ) -> None:
        self.answers.append(await handler(PlacesQuestion()))


async def test_an_order_that_fails_in_a_new_way_is_refused_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bus = Asked()
    await PlacesService(cast(Places, BrokenPlaces()), TaskGuard(), cast(Any, None)).serve(cast(Bus, bus), "places")
    (answer,) = bus.answers
    assert isinstance(answer, Refused)
    assert "KeyError: 'nobody has thought of this'" in answer.cause
    assert "an order has failed: PlacesQuestion" in caplog.text
