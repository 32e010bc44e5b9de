"""The budget of devices that all endpoints share."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

from hypothesis import assume, given
from hypothesis import strategies as st

from dynamo_local.core.planning.decide import Pool, Share, exact, share

ONE = Fraction(1)
sizes = st.sampled_from([Fraction(1, 3), Fraction(1, 2), ONE, Fraction(2)])


@st.composite
def pools(draw: st.DrawFn, sizes: st.SearchStrategy[Fraction] = sizes) -> tuple[Pool, ...]:
    """Pools of up to six endpoints, some of the same age."""
    found = []
    for number in range(draw(st.integers(0, 6))):
        minimum = draw(st.integers(0, 3))
        found.append(
            Pool(
                endpoint=f"e{number}",
                role="aggregated",
                created_at=float(draw(st.integers(0, 3))),
                devices=draw(sizes),
                minimum=minimum,
                wanted=minimum + draw(st.integers(0, 6)),
                ordered=minimum + draw(st.integers(0, 6)),
                staying=draw(st.integers(0, 6)),
                leaving=draw(st.integers(0, 2)),
                fixed=draw(st.sampled_from([False, False, True])),
            )
        )
    return tuple(found)


budgets = st.integers(0, 16)


def a_pool(name: str, wanted: int, *, minimum: int = 1, ordered: int | None = None, age: float = 0.0) -> Pool:
    """A pool that runs what was ordered; by default its minimum."""
    running = minimum if ordered is None else ordered
    return Pool(name, "aggregated", age, ONE, minimum, wanted, running, running)


def gets(shares: tuple[Share, ...]) -> dict[str, int]:
    return {one.pool.endpoint: one.gets for one in shares}


def orders(shares: tuple[Share, ...]) -> dict[str, int]:
    return {one.pool.endpoint: one.order for one in shares}


@given(pools(), budgets, st.integers(0, 4))
def test_shares_never_exceed_the_budget(some: tuple[Pool, ...], devices: int, taken: int) -> None:
    shares = share(some, devices, taken)
    fixed = sum((one.pool.takes(one.pool.ordered) for one in shares if one.pool.fixed), Fraction(0))
    given_out = sum((one.pool.devices * one.gets for one in shares if not one.pool.fixed), Fraction(0))
    assert given_out == 0 or given_out + fixed + taken <= devices


@given(pools(), budgets, st.integers(0, 4))
def test_no_order_takes_a_device_beyond_the_budget(some: tuple[Pool, ...], devices: int, taken: int) -> None:
    shares = share(some, devices, taken)
    after = taken + sum((one.pool.takes(one.order) for one in shares), Fraction(0))
    increased = any(one.pool.takes(one.order) > one.pool.takes(one.pool.ordered) for one in shares)
    assert not increased or after <= devices


@given(pools(), budgets, st.integers(0, 4))
def test_minimums_are_kept_when_they_fit(some: tuple[Pool, ...], devices: int, taken: int) -> None:
    fixed = sum((pool.takes(pool.ordered) for pool in some if pool.fixed), Fraction(0))
    assume(taken + fixed + sum(pool.devices * pool.minimum for pool in some if not pool.fixed) <= devices)
    for one in share(some, devices, taken):
        if not one.pool.fixed:
            assert one.pool.minimum <= one.gets <= one.pool.wanted
            assert one.order >= min(one.pool.ordered, one.pool.minimum)


@given(pools(), budgets)
def test_nobody_starves(some: tuple[Pool, ...], devices: int) -> None:
    """Where each pool has room for its minimum and at least one worker, none that wants one gets none, however much
    the others want."""
    mine = [replace(pool, fixed=False) for pool in some]
    assume(sum(pool.devices * max(pool.minimum, 1) for pool in mine) <= devices)
    for one in share(mine, devices, 0):
        assert one.gets >= min(1, one.pool.wanted)


@given(pools(), budgets, st.integers(0, 4), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(
    some: tuple[Pool, ...], devices: int, taken: int, random: Random
) -> None:
    shuffled = list(some)
    random.shuffle(shuffled)
    assert share(shuffled, devices, taken) == share(some, devices, taken)


@given(pools(st.just(ONE)), budgets)
def test_with_more_devices_nobody_gets_less(some: tuple[Pool, ...], devices: int) -> None:
    fewer, more = gets(share(some, devices, 0)), gets(share(some, devices + 1, 0))
    assert all(fewer[name] <= more[name] for name in fewer)


@given(pools(st.just(ONE)), budgets)
def test_who_wants_more_gets_no_less_and_the_others_no_more(some: tuple[Pool, ...], devices: int) -> None:
    mine = [replace(pool, fixed=False) for pool in some]
    assume(mine)
    before = gets(share(mine, devices, 0))
    after = gets(share([replace(mine[0], wanted=mine[0].wanted + 1), *mine[1:]], devices, 0))
    assert after[mine[0].endpoint] >= before[mine[0].endpoint]
    assert all(after[pool.endpoint] <= before[pool.endpoint] for pool in mine[1:])


@given(pools(), budgets, st.integers(0, 4))
def test_what_is_free_is_used(some: tuple[Pool, ...], devices: int, taken: int) -> None:
    """Nobody lacks a worker that would fit."""
    shares = share(some, devices, taken)
    used = taken + sum(
        (one.pool.takes(one.pool.ordered) if one.pool.fixed else one.pool.devices * one.gets for one in shares),
        Fraction(0),
    )
    for one in shares:
        if not one.pool.fixed and one.gets < one.pool.wanted:
            assert used + one.pool.devices > devices


@given(pools(), budgets, st.integers(0, 4))
def test_orders_lead_to_the_shares(some: tuple[Pool, ...], devices: int, taken: int) -> None:
    """Once the orders are carried out and what leaves has ended, the next orders reach the shares."""
    mine = [replace(pool, fixed=False) for pool in some]
    assume(taken + sum(pool.devices * pool.minimum for pool in mine) <= devices)
    shares = share(mine, devices, taken)
    done = [replace(one.pool, ordered=one.order, staying=one.order, leaving=0) for one in shares]
    assert orders(share(done, devices, taken)) == gets(shares)


def test_minimums_come_first_and_those_of_the_oldest_before_others() -> None:
    some = [a_pool("old", 6, minimum=2), a_pool("mid", 2, minimum=2, age=1.0), a_pool("new", 2, minimum=2, age=2.0)]
    assert gets(share(some, 5, 0)) == {"old": 2, "mid": 2, "new": 1}


def test_the_rest_goes_to_whoever_lacks_the_largest_share_of_its_want() -> None:
    assert gets(share([a_pool("chat", 8), a_pool("code", 4, age=1.0)], 6, 0)) == {"chat": 4, "code": 2}
    assert gets(share([a_pool("chat", 4), a_pool("code", 4, age=1.0)], 5, 0)) == {"chat": 3, "code": 2}


def test_devices_that_are_given_back_are_ordered_by_others_only_when_free() -> None:
    chat, code = a_pool("chat", 1, ordered=7), a_pool("code", 6, age=1.0)
    first = share([chat, code], 8, 0)
    assert gets(first) == {"chat": 1, "code": 6}
    assert orders(first) == {"chat": 1, "code": 1}
    ending = replace(chat, ordered=1, staying=1, leaving=4)
    assert orders(share([ending, code], 8, 0)) == {"chat": 1, "code": 3}


def test_shares_of_devices_are_counted_exactly() -> None:
    thirds = Pool("embed", "aggregated", 0.0, exact(1 / 3), 0, 9, 0, 0)
    assert gets(share([thirds], 2, 0)) == {"embed": 6}
    halves = Pool("embed", "aggregated", 0.0, exact(0.5), 1, 2, 1, 1)
    assert gets(share([halves, a_pool("chat", 8, age=1.0)], 4, 0)) == {"embed": 2, "chat": 3}
