"""The server that a command means, where its namespace is not given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import NotRunningError, UsageError
from dynamo_local.core.server_choice import choose_server, choose_server_to_stop

NAMES = st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True)


@given(NAMES)
def test_the_only_server_that_runs_is_meant_whatever_has_crashed(crashed: list[str]) -> None:
    assert choose_server(["z"], crashed) == choose_server_to_stop(["z"], crashed) == "z"


def test_of_several_none_is_chosen_and_all_are_named() -> None:
    for choose in (choose_server, choose_server_to_stop):
        with pytest.raises(UsageError) as refused:
            choose(["second", "dynamo"], ["third"])
        assert str(refused.value) == "2 servers run: dynamo, second; name one by --namespace or DYN_NAMESPACE"


def test_without_a_server_that_is_said_and_what_starts_one() -> None:
    with pytest.raises(NotRunningError) as refused:
        choose_server([], [])
    assert str(refused.value) == "no server runs; start one: dynamo serve MODEL"


def test_what_crashed_servers_left_is_named_with_the_command_that_removes_it() -> None:
    with pytest.raises(NotRunningError, match=r"^no server runs \(one that crashed .*`dynamo stop --namespace a` rem"):
        choose_server([], ["a"])
    with pytest.raises(NotRunningError, match=r"\(2 that .*`dynamo stop --namespace a`, `dynamo stop --namespace b`"):
        choose_server_to_stop([], ["b", "a"])


@given(NAMES)
def test_only_stop_means_a_crashed_server_if_it_is_the_only_one(crashed: list[str]) -> None:
    with pytest.raises(NotRunningError):
        choose_server([], crashed)
    if len(crashed) == 1:
        assert choose_server_to_stop([], crashed) == crashed[0]
    else:
        with pytest.raises(NotRunningError):
            choose_server_to_stop([], crashed)
