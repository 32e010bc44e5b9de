"""Room for adapters: what is ordered gets it, and what the owner has given is not changed unasked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.adapters import (
    RANK,
    RANKS,
    SLOTS,
    most_rank,
    room_of,
    served_on,
    settings_of,
    shortage,
    takes_adapters,
    with_room,
)
from dynamo_local.core.endpoints.checks import changed_spec, read_spec, runs_differently
from dynamo_local.core.endpoints.spec import AdapterRoom, EndpointSpec
from dynamo_local.core.errors import EndpointConflictError
from dynamo_local.engine.vllm.arguments import every_argument

ONE, TWO = {"one": 8}, {"one": 8, "two": 8}


def base(**args: Any) -> EndpointSpec:
    return read_spec({"name": "chat", "model": "m", "args": args})


PLAIN, ENABLED = base(), base(enable_lora=True)

adapters = st.lists(st.integers(0, RANKS[-1]), max_size=12).map(
    lambda ranks: {f"a{number}": rank for number, rank in enumerate(ranks)}
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "enable-lora": st.sampled_from([True, False, "true"]),
        "max-loras": st.integers(1, 9),
        "max-lora-rank": st.sampled_from(RANKS),
        "lora-modules": st.lists(st.just("s=/s"), max_size=2),
        "seed": st.just(1),
    },
)
rooms = st.none() | st.builds(AdapterRoom, st.integers(1, 16), st.sampled_from(RANKS))


@st.composite
def bases(draw: st.DrawFn) -> EndpointSpec:
    return EndpointSpec(
        name="chat",
        model="m",
        engine="vllm" if draw(st.booleans()) else "mocker",
        args=draw(arguments),
        adapter_room=draw(rooms),
    )


@given(bases(), adapters, st.booleans())
def test_a_rolled_base_has_room_for_all_and_is_changed_only_where_it_must(
    spec: EndpointSpec, ranks: dict[str, int], on_cpu: bool
) -> None:
    roomy = with_room(spec, ranks, on_cpu=on_cpu, of="a0", roll=True)
    assert shortage(roomy, ranks, on_cpu=on_cpu) == ""
    assert (roomy == spec) == (not shortage(spec, ranks, on_cpu=on_cpu))
    assert with_room(roomy, ranks, on_cpu=on_cpu) == roomy
    assert set(roomy.args) == set(spec.args), "what its owner has not given is not among the arguments"
    if spec.adapter_room is not None and roomy.adapter_room is not None:
        assert roomy.adapter_room.slots >= spec.adapter_room.slots
        assert roomy.adapter_room.rank >= spec.adapter_room.rank
    if roomy.args == spec.args:
        assert with_room(spec, ranks, on_cpu=on_cpu, of="a0") == roomy
        return
    with pytest.raises(EndpointConflictError, match="--roll"):
        with_room(spec, ranks, on_cpu=on_cpu, of="a0")


@given(bases(), adapters, st.booleans())
def test_a_revision_serves_what_it_has_room_for(spec: EndpointSpec, ranks: dict[str, int], on_cpu: bool) -> None:
    served = served_on(spec, ranks, on_cpu=on_cpu)
    assert shortage(spec, {name: ranks[name] for name in served}, on_cpu=on_cpu) == ""
    for name in ranks.keys() - set(served):
        assert shortage(spec, {one: ranks[one] for one in (*served, name)}, on_cpu=on_cpu)


@given(bases(), st.booleans())
def test_workers_are_started_with_the_room_that_is_counted_on(spec: EndpointSpec, on_cpu: bool) -> None:
    args = settings_of(spec)
    assert spec.args.items() <= args.items()
    started = EndpointSpec(name="chat", model="m", engine=spec.engine, args=args)
    assert takes_adapters(started) == takes_adapters(spec)
    if takes_adapters(spec):
        assert (room_of(started), most_rank(started)) == (room_of(spec), most_rank(spec))


def test_the_first_of_a_plain_endpoint_has_it_rolled_and_the_next_ones_do_not() -> None:
    assert shortage(PLAIN, ONE, on_cpu=True) == "its workers were started without room for adapters"
    rolled = with_room(PLAIN, ONE, on_cpu=True, of="one")
    assert runs_differently(PLAIN, rolled)
    assert settings_of(rolled) == {"enable-lora": True}
    four = {f"a{number}": RANK for number in range(SLOTS)}
    assert shortage(rolled, four, on_cpu=True) == ""
    five = four | {"five": 8}
    assert shortage(rolled, five, on_cpu=False) == ""
    assert "room for 4 adapters" in shortage(rolled, five, on_cpu=True)
    assert settings_of(with_room(rolled, five, on_cpu=True))["max-loras"] == 8


def test_a_larger_rank_has_it_rolled() -> None:
    large = ONE | {"large": 40}
    assert (
        shortage(ENABLED, large, on_cpu=False) == "its workers were started for adapters of rank 16, and large has 40"
    )
    assert settings_of(with_room(ENABLED, large, on_cpu=False)) == {"enable-lora": True, "max-lora-rank": 64}
    with pytest.raises(EndpointConflictError, match="huge has rank 513, and vLLM takes 512 at most"):
        with_room(ENABLED, {"huge": 513}, on_cpu=False, of="huge", roll=True)


@pytest.mark.parametrize(
    ("args", "ranks", "said", "rolled"),
    [
        ({"enable-lora": False}, ONE, "one: its base chat takes no adapters, by its enable-lora: false", True),
        ({"enable-lora": True, "max-loras": 1}, TWO, "set max-loras of chat to 2 or more, or order it with --roll", 4),
        ({"enable-lora": True, "max-lora-rank": 1}, ONE, "set max-lora-rank of chat to 8, or order it with --roll", 8),
    ],
)
def test_what_the_owner_has_given_is_changed_only_if_asked_for(
    args: dict[str, Any], ranks: dict[str, int], said: str, rolled: object
) -> None:
    with pytest.raises(EndpointConflictError, match=said):
        with_room(base(**args), ranks, on_cpu=True, of="one")
    roomy = with_room(base(**args), ranks, on_cpu=True, of="one", roll=True)
    key = list(args)[-1]
    assert roomy.args == args | {key: rolled}


def test_a_base_keeps_room_as_long_as_it_has_adapters() -> None:
    rolled = with_room(PLAIN, TWO, on_cpu=True)
    assert changed_spec(rolled, {"args": {"seed": 1}}).adapter_room == rolled.adapter_room
    off = changed_spec(rolled, {"args": {"enable-lora": False}})
    assert "enable-lora" in settings_of(off)
    assert settings_of(off)["enable-lora"] is False
    with pytest.raises(
        EndpointConflictError, match=r"chat is the base of 2 adapters \(one, two\), and takes no"
    ) as why:
        with_room(off, TWO, on_cpu=True)
    assert str(why.value).endswith("leave out args.enable-lora, or delete its adapters first")


def test_ranks_are_those_of_vllm() -> None:
    assert every_argument()["max-lora-rank"].choices == RANKS
