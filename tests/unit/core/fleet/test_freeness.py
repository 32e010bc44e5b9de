"""Freeness, by Llumnix's definition."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.fleet.freeness import (
    HEAD_GROWS_S,
    HEADROOM,
    Instance,
    Usage,
    freeness,
    freest,
    instance_of,
    virtual_usage,
    with_more,
)
from dynamo_local.core.fleet.rates import STALE_S
from dynamo_local.core.messages.presence import ClassUsage, EngineInfo, Load, Presence
from dynamo_local.core.priority.classes import PriorityClass

NOW = 100.0

usages = st.lists(
    st.builds(Usage, tokens=st.floats(0, 1e5), priority_class=st.sampled_from(PriorityClass)), max_size=8
).map(tuple)
instances = st.builds(
    Instance, kv_tokens=st.floats(1, 1e6), running=usages, head_tokens=st.floats(0, 1e5), terminating=st.just(False)
)


def test_it_is_the_number_of_steps_until_the_cache_is_full() -> None:
    assert freeness(Instance(1000, (Usage(300), Usage(100)))) == 300


def test_the_first_of_the_queue_counts_in_full_and_makes_it_negative() -> None:
    assert freeness(Instance(1000, (Usage(800), Usage(100)), head_tokens=400)) == -150


def test_a_class_shares_its_headroom() -> None:
    high, background = PriorityClass.HIGH, PriorityClass.BACKGROUND
    instance = Instance(1000, (Usage(100, high), Usage(100, high), Usage(100)))
    assert virtual_usage(instance, {high: 0.2}) == 500
    assert virtual_usage(instance, {background: 0.2}) == 300
    gone = with_more(with_more(instance, Usage(-100, high, -1)), Usage(-100, high, -1))
    assert virtual_usage(gone, {high: 0.2}) == 100


def test_a_worker_that_runs_urgent_requests_is_less_free() -> None:
    calm = worker("a", 0.2, 4)
    assert calm.load is not None
    classes = (ClassUsage("high", 1, 10), ClassUsage("normal", 3, 10))
    urgent = msgspec.structs.replace(calm, load=msgspec.structs.replace(calm.load, by_class=classes))
    found = instance_of(urgent, NOW)
    assert found is not None
    assert freeness(found) == (1000 - 200 - 1000 * HEADROOM[PriorityClass.HIGH]) / 4
    assert chosen(urgent, worker("b", 0.25, 4)) == "b"


@given(instances, st.floats(0, 100), st.floats(0, 100))
def test_the_first_of_the_queue_counts_more_the_longer_it_waits(instance: Instance, one: float, other: float) -> None:
    shorter, longer = sorted((one, other))
    assert freeness(replace(instance, head_age_s=longer)) <= freeness(replace(instance, head_age_s=shorter))
    assert freeness(replace(instance, head_age_s=HEAD_GROWS_S)) == freeness(instance)


def test_nothing_is_put_on_a_worker_that_ends() -> None:
    assert freeness(Instance(1000, terminating=True)) == -math.inf


def test_an_empty_worker_is_free_as_a_whole() -> None:
    assert freeness(Instance(1000)) == 1000


@given(instances, st.floats(1, 1e5))
def test_more_to_do_is_never_freer(instance: Instance, tokens: float) -> None:
    fuller = Instance(instance.kv_tokens, instance.running, instance.head_tokens + tokens)
    assert freeness(fuller) < freeness(instance)


@given(instances, st.randoms())
def test_the_order_of_requests_does_not_matter(instance: Instance, random: object) -> None:
    turned = Instance(instance.kv_tokens, instance.running[::-1], instance.head_tokens)
    assert freeness(turned) == freeness(instance)


def worker(lease: str, kv_usage: float | None, running: int = 1, *, waiting: int = 0, head: int | None = 0) -> Presence:
    load = None if kv_usage is None else Load(running, waiting, kv_usage, at=NOW, head_tokens=head)
    return Presence(
        lease, "W", "aggregated", lease, 1, "ready", engine=EngineInfo("e", "m", 1000, 10, 100, 8), load=load
    )


def test_a_worker_tells_all_that_is_needed() -> None:
    instance = instance_of(worker("a", 0.5, 4, waiting=2, head=200), NOW)
    assert instance is not None
    assert freeness(instance) == (1000 - 500 - 200) / 4
    coming = instance_of(worker("a", 0.5, 4), NOW, Usage(100, requests=1))
    assert coming is not None
    assert freeness(coming) == (1000 - 600) / 5


def test_a_worker_that_drains_is_never_free() -> None:
    instance = instance_of(msgspec.structs.replace(worker("a", 0.0), state="draining"), NOW)
    assert instance is not None
    assert freeness(instance) == -math.inf


@pytest.mark.parametrize(
    "unknown",
    [
        worker("a", None),
        worker("a", 0.1, waiting=1, head=None),
        msgspec.structs.replace(worker("a", 0.1), engine=None),
    ],
)
def test_of_what_is_not_known_nothing_is_made(unknown: Presence) -> None:
    assert instance_of(unknown, NOW) is None


def test_a_reading_that_is_stale_is_unknown() -> None:
    assert instance_of(worker("a", 0.1), NOW + STALE_S + 1) is None


def chosen(*candidates: Presence, changes: dict[str, Usage] | None = None, avoid: str | None = None) -> str | None:
    found = freest(candidates, changes or {}, NOW, avoid)
    return None if found is None else found.lease


def test_the_freest_worker_is_chosen() -> None:
    workers = [worker("x", 0.5), worker("y", 0.2), worker("z", 0.7)]
    assert chosen(*workers) == "y"
    assert chosen(*workers, changes={"y": Usage(400, requests=1)}) == "x"
    assert chosen(*workers, avoid="y") == "x"
    assert chosen(workers[1], avoid="y") == "y"
    # Emptier, but with so many requests it is full sooner.
    assert chosen(worker("x", 0.5, 2), worker("y", 0.2, 8)) == "x"


def test_a_worker_of_which_nothing_is_known_is_the_last_choice() -> None:
    assert chosen(worker("x", 0.9), worker("y", None)) == "x"
    assert chosen(worker("y", None)) == "y"
    assert chosen(msgspec.structs.replace(worker("n", 0.1), engine=None)) is None
