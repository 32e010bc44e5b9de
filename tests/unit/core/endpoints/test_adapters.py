"""Adapters that the workers of their base cannot serve are refused before anything is ordered."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.adapters import RANK, check_adapters, most_rank, room_of
from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import EndpointConflictError


def base(**args: Any) -> EndpointSpec:
    return read_spec({"name": "chat", "model": "m", "args": args})


def adapter(name: str) -> EndpointSpec:
    return read_spec({"name": name, "model": "/lora", "adapter_of": "chat"})


PLAIN, ENABLED = base(), base(enable_lora=True)
TWO = [adapter("one"), adapter("two")]


def test_a_base_without_adapters_says_what_to_set() -> None:
    said = (
        r"endpoint one: its base chat takes no adapters; set enable-lora of it: dynamo endpoint update chat --set "
        r"args\.enable-lora=true"
    )
    for off in (PLAIN, base(enable_lora=False), base(enable_lora=None)):
        with pytest.raises(EndpointConflictError, match=said):
            check_adapters(adapter("one"), [off], on_cpu=True)
    check_adapters(adapter("one"), [ENABLED], on_cpu=True)
    check_adapters(PLAIN, [], on_cpu=True)
    check_adapters(PLAIN, [read_spec({"name": "fr", "model": "/l", "adapter_of": "other"})], on_cpu=True)


def test_a_base_keeps_adapters_enabled_as_long_as_it_has_some() -> None:
    with pytest.raises(
        EndpointConflictError, match=r"chat is the base of 2 adapters \(one, two\), and takes no"
    ) as why:
        check_adapters(PLAIN, TWO, on_cpu=False)
    assert str(why.value).endswith("keep args.enable-lora, or delete its adapters first")


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 8))
def test_no_more_adapters_than_a_worker_on_a_cpu_has_room_for(slots: int, static: int, number: int) -> None:
    own = base(enable_lora=True, max_loras=slots, lora_modules=[f"s{each}=/s" for each in range(static)])
    adapters = [adapter(f"a{each}") for each in range(number)]
    first, others = adapters[0], [own, *adapters[1:]]
    check_adapters(first, others, on_cpu=False)
    if number <= room_of(own):
        check_adapters(first, others, on_cpu=True)
        check_adapters(own, adapters, on_cpu=True)
        return
    for spec, rest in ((first, others), (own, adapters)):
        with pytest.raises(EndpointConflictError, match=f"set max-loras of chat to {number + static} or more"):
            check_adapters(spec, rest, on_cpu=True)
    enough = base(**own.args | {"max-loras": number + static})
    check_adapters(enough, adapters, on_cpu=True)


def test_the_largest_rank_is_that_of_the_base() -> None:
    assert (most_rank(ENABLED), most_rank(base(max_lora_rank=8))) == (RANK, 8)
