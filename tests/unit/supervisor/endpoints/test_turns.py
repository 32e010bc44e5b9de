"""Swaps of devices, told once when they are decided and once when they are over."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from dynamo_local.core.endpoints.turns import Turns, Yield
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.shares import on_node
from dynamo_local.supervisor.endpoints.turns import Swaps, TurnKeeper
from tests.unit.state.builders import empty_state
from tests.unit.supervisor.endpoints.made_parts import keeper_of

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


# On which nodes the workers of endpoints start that take turns.

STATE = empty_state()
A0, A1, B0, B1 = *on_node(0, (0, 1)), *on_node(1, (0, 1))


def keeper(free: Mapping[int, float], **reserved: tuple[int, ...]) -> TurnKeeper:
    """Of nodes `a` and `b`. `reserved`: devices by the endpoint that they are kept for."""
    capacity = SimpleNamespace(free=lambda _: free, node=lambda device: "b" if device >= B0 else "a")
    made = keeper_of(capacity)
    made.turns = Turns(reserved=reserved)
    return made


def test_without_turns_the_cluster_chooses() -> None:
    assert keeper({A0: 1.0}).nodes("chat", STATE, [1, 1]) == ("", "")
    # No other one can lose its place.
    assert keeper({A0: 1.0}, chat=(A0,)).nodes("chat", STATE, [1, 1]) == ("", "")


def test_an_endpoint_gets_the_node_of_the_devices_that_are_kept_for_it() -> None:
    free = dict.fromkeys((A0, A1, B0, B1), 1.0)
    assert keeper(free, chat=(B1,), code=(A0,)).nodes("chat", STATE, [1, 1, 1, 1]) == ("b", "a", "b")


def test_another_one_gets_a_node_where_nothing_is_kept() -> None:
    free = dict.fromkeys((A0, A1, B0), 1.0)
    assert keeper(free, chat=(A0,)).nodes("code", STATE, [1, 1]) == ("a", "b")
    assert keeper(free, chat=(A0,)).nodes("code", STATE, [2]) == ()
    assert keeper({A0: 1.0}, chat=(A0,)).nodes("code", STATE, [1]) == ()
    assert keeper({A0: 1.0}, chat=(A0,)).most("code", STATE, [1]) == 0


def test_what_is_kept_and_does_not_become_free_is_waited_for_elsewhere_too() -> None:
    """The devices that are kept for it may have gone with their node meanwhile."""
    assert keeper({B0: 1.0}, chat=(A0,), code=(A1,)).nodes("chat", STATE, [1, 1]) == ("b",)
