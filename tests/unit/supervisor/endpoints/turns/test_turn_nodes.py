"""On which nodes the workers of endpoints start that take turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from dynamo_local.core.endpoints.turns import Limits, Turns
from dynamo_local.core.shares import on_node
from dynamo_local.supervisor.endpoints.turns.turning import TurnKeeper, TurnPorts
from tests.unit.state.builders import empty_state

STATE = empty_state()
A0, A1, B0, B1 = *on_node(0, (0, 1)), *on_node(1, (0, 1))


def keeper(free: Mapping[int, float], **reserved: tuple[int, ...]) -> TurnKeeper:
    """Of nodes `a` and `b`. `reserved`: devices by the endpoint that they are kept for."""
    nothing: Any = None
    ports = TurnPorts(
        runs=lambda: (),
        read_state=nothing,
        free=lambda _: free,
        ids=nothing,
        node=lambda device: "b" if device >= B0 else "a",
        publish=cast("Any", nothing),
        record=nothing,
        limits=Limits(),
    )
    made = TurnKeeper(ports)
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
