"""Swaps of devices, told once when they are decided and once when they are over."""

from __future__ import annotations

import pytest

from dynamo_local.core.endpoints.turns import Yield
from dynamo_local.core.messages.events import Event
from dynamo_local.supervisor.endpoints.turns.turning import Swaps

YIELD = Yield("chat", "code", ("w",), False, False, "yields its device to code, asked for 2.0 s ago: its turn is over")


class Told:
    """The swaps of a server in which `code` is awake, and ready since `ready_at`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.swaps = Swaps(self.events.append)
        self.is_awake = True
        self.ready_at: float | None = None

    def look(self, now: float, *yields: Yield) -> None:
        self.swaps.look(yields, lambda name: (self.is_awake, self.ready_at) if name == "code" else (False, None), now)


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_swap_ends_when_the_other_endpoint_has_a_worker(told: Told) -> None:
    told.look(10.0, YIELD)
    told.look(11.0, YIELD)
    # The workers have ended, and that of the other endpoint starts.
    told.look(12.0)
    told.ready_at = 12.5
    told.look(13.0)
    told.look(14.0)
    begun, ended = told.events
    assert (begun.kind, begun.endpoint, begun.to, begun.took_s) == ("swap", "chat", "code", None)
    assert (begun.what, begun.why) == ("yields its device to code", "asked for 2.0 s ago: its turn is over")
    assert (ended.endpoint, ended.to, ended.took_s, ended.why) == ("chat", "code", 2.5, begun.why)
    assert not told.swaps.are_under_way


def test_a_swap_is_over_when_nobody_waits_any_more(told: Told) -> None:
    told.look(10.0, YIELD)
    told.is_awake = False
    told.look(11.0)
    assert not told.swaps.are_under_way
    assert len(told.events) == 1
    # It is decided anew for the next one who asks.
    told.is_awake = True
    told.look(20.0, YIELD)
    assert len(told.events) == 2


def test_a_schedule_keeps_the_swap_until_its_endpoint_is_woken(told: Told) -> None:
    told.is_awake = False
    told.look(10.0, YIELD)
    assert told.swaps.are_under_way


def test_a_worker_that_was_there_before_ends_no_swap(told: Told) -> None:
    told.ready_at = 5.0
    told.look(10.0, YIELD)
    assert len(told.events) == 1
