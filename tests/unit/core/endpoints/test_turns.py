from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.endpoints.turn_bounds import least_swaps
from benchmarks.endpoints.turn_world import Arrival, World
from dynamo_local.core.endpoints.turns import Claim, Contender, Limits, Turns, longest_wait_s, take_turns
from dynamo_local.core.shares import Left, fits, less, more, on_node, placed

NOW = 1000.0
LIMITS = Limits(turn_s=30, pause_s=0.2)


def busy(name: str, device: int, since: float, running: int | None = 1, **more: object) -> Contender:
    return replace(
        Contender(name, (Claim(f"{name}_0", (device,)),), running=running, turn_since=since),
        **more,  # type: ignore[arg-type]
    )


def idle(name: str, device: int, since: float, **more: object) -> Contender:
    return busy(name, device, 0.0, 0, **{"idle_since": since, **more})


def waiting(name: str, since: float, *needs: float) -> Contender:
    return Contender(name, needs=needs or (1.0,), waits_since=since)


def test_an_idle_endpoint_yields_at_once_the_least_recently_used_first() -> None:
    turns = take_turns([idle("a", 0, 990), idle("b", 1, 980), waiting("c", 999)], {}, NOW, LIMITS)
    (only,) = turns.yields
    assert turns.waits == {"c": "waits for a device: the workers that hold it are ending"}
    assert (only.endpoint, only.to, only.workers, only.finishing) == ("b", "c", ("b_0",), False)
    assert only.why == "yields its device to c, asked for 1.0 s ago: without a request for 20 s"
    assert turns.reserved == {"c": (1,)}
    assert turns.closed == {"b"}


def test_nobody_yields_what_is_free() -> None:
    turns = take_turns([idle("a", 0, 900), waiting("c", 999)], {1: 1.0}, NOW, LIMITS)
    assert not turns.yields
    assert turns.reserved == {"c": (1,)}
    assert turns.reserved_for_others("a") == {1: "c"}
    assert turns.reserved_for_others("c") == {}


def test_a_busy_endpoint_keeps_its_device_for_its_turn_then_finishes_what_it_has() -> None:
    early = take_turns([busy("a", 0, NOW - 10), waiting("b", 995)], {}, NOW, LIMITS)
    assert not early.yields
    assert early.look_at == NOW + 20
    assert early.waits == {"b": "waits for a device: a may keep it for the rest of a turn of 30 s"}
    late = take_turns([busy("a", 0, NOW - 31, 3), waiting("b", 995)], {}, NOW, LIMITS)
    (only,) = late.yields
    assert only.finishing
    assert only.why == "yields its device to b, asked for 5.0 s ago: its turn of 30 s is over, 3 requests finish first"
    assert late.waits == {"b": "waits for a device: requests of a finish first"}


def test_a_busy_endpoint_goes_on_for_as_long_as_nobody_waits() -> None:
    assert not take_turns([busy("a", 0, 0.0), idle("b", 1, 0.0)], {}, NOW, LIMITS).closed


def test_requests_that_are_not_known_count_as_running() -> None:
    (only,) = take_turns([busy("a", 0, 0.0, None), waiting("b", 995)], {}, NOW, LIMITS).yields
    assert only.finishing


def test_a_client_has_a_pause_between_two_questions() -> None:
    within = idle("a", 0, NOW - 0.1, turn_since=NOW - 5)
    turns = take_turns([within, waiting("b", 995)], {}, NOW, LIMITS)
    assert not turns.yields
    assert turns.look_at == pytest.approx(NOW + 0.1)
    after_turn = replace(within, turn_since=NOW - 40)
    assert take_turns([after_turn, waiting("b", 995)], {}, NOW, LIMITS).closed == {"a"}


def test_who_has_waited_longest_comes_first() -> None:
    turns = take_turns([waiting("b", 990), waiting("c", 980), idle("a", 0, 900)], {}, NOW, LIMITS)
    assert turns.reserved == {"c": (0,)}
    assert turns.waits["b"] == "waits for a device: c waited before it"


def test_minimums_are_not_touched() -> None:
    turns = take_turns([idle("a", 0, 0.0, least=1), waiting("b", 0.0)], {}, NOW, LIMITS)
    assert not turns.yields
    assert turns.waits == {
        "b": "waits for a device: all are held by minimums of endpoints, or by others on the machine"
    }


def test_workers_beyond_the_minimum_yield_while_others_stay() -> None:
    claims = tuple(Claim(f"a_{device}", (device,)) for device in range(3))
    scaled = Contender("a", claims, least=1, running=8, turn_since=0.0)
    (only,) = take_turns([scaled, waiting("b", 999)], {}, NOW, LIMITS).yields
    assert only.workers == ("a_1",)
    assert only.stays
    assert only.why == "yields 1 of its 3 workers to b, asked for 1.0 s ago: its turn of 30 s is over"


def test_shares_on_one_device_yield_together_for_a_whole_one() -> None:
    halves = [
        Contender(name, (Claim(f"{name}_0", (device,), 0.5),), idle_since=since, turn_since=0.0)
        for name, device, since in (("a", 0, 900.0), ("b", 1, 910.0), ("c", 0, 920.0), ("d", 1, 930.0))
    ]
    turns = take_turns([*halves, waiting("e", 999)], {0: 0.0, 1: 0.0}, NOW, LIMITS)
    assert {each.endpoint for each in turns.yields} == {"a", "c"}
    assert turns.reserved == {"e": (0,)}


def test_a_worker_of_two_devices_claims_both_and_smaller_ones_do_not_pass_it() -> None:
    large = waiting("large", 900.0, 2.0)
    turns = take_turns([large, waiting("small", 950), idle("a", 0, 900), busy("b", 1, NOW - 5)], {}, NOW, LIMITS)
    assert not turns.yields
    assert turns.reserved == {"large": (0, 1)}
    assert turns.look_at == NOW + 25


def test_prefill_workers_end_with_the_last_one() -> None:
    pair = (Claim("a_0", (0,)), Claim("a_p", (1,), prefill=True))
    (only,) = take_turns(
        [Contender("a", pair, idle_since=0.0, turn_since=0.0), waiting("b", 9)], {}, NOW, LIMITS
    ).yields
    assert only.workers == ("a_0", "a_p")


def test_a_schedule_takes_only_what_nobody_has_used_for_a_turn() -> None:
    kept = Contender("k", needs=(1.0,), kept=True)
    assert take_turns([kept, idle("a", 0, NOW - 31)], {}, NOW, LIMITS).closed == {"a"}
    soon = take_turns([kept, idle("a", 0, NOW - 20)], {}, NOW, LIMITS)
    assert not soon.yields
    assert soon.look_at == NOW + 10
    assert not take_turns([kept, busy("a", 0, 0.0)], {}, NOW, LIMITS).yields
    # Kept, it is the last of the idle ones to yield.
    turns = take_turns([idle("k", 0, 100, kept=True), idle("a", 1, 990), waiting("b", 999)], {}, NOW, LIMITS)
    assert turns.closed == {"a"}


# Properties.

DEVICES = 4
times = st.floats(0, NOW).map(lambda time: round(time, 1))


@st.composite
def contenders(draw: st.DrawFn) -> tuple[list[Contender], dict[int, float]]:
    """Endpoints whose claims fit the devices, and what is left of these."""
    room = dict.fromkeys(range(DEVICES), 1.0)
    found = []
    for number in range(draw(st.integers(1, 7))):
        name, amount = f"e{number}", draw(st.sampled_from([0.25, 0.5, 1.0, 2.0]))
        claims: list[Claim] = []
        for worker in range(draw(st.integers(0, 2))):
            where = placed(room, [amount])
            if where is not None:
                claims.append(Claim(f"{name}_{worker}", where[0], min(amount, 1.0)))
                room = less(room, where[0], min(amount, 1.0))
        ending = draw(st.booleans())
        is_idle, lacks = draw(st.booleans()), ending or not claims
        found.append(
            Contender(
                name,
                workers=() if ending else tuple(claims),
                ending=tuple(claims) if ending else (),
                least=draw(st.integers(0, 1)),
                running=0 if is_idle or lacks else draw(st.none() | st.integers(0, 3)),
                idle_since=draw(times) if is_idle and not lacks else None,
                turn_since=draw(st.none() | times),
                needs=(amount,) if lacks else (),
                waits_since=draw(st.none() | times) if lacks else None,
                kept=draw(st.booleans()),
            )
        )
    return found, room


@given(contenders(), st.randoms(use_true_random=False))
def test_the_order_of_arguments_is_irrelevant(drawn: tuple[list[Contender], dict[int, float]], random: object) -> None:
    found, room = drawn
    other = list(found)
    random.shuffle(other)  # type: ignore[attr-defined]
    assert take_turns(found, room, NOW, LIMITS) == take_turns(other, dict(reversed(room.items())), NOW, LIMITS)


@given(contenders())
def test_no_device_is_given_twice_and_none_without_need(drawn: tuple[list[Contender], dict[int, float]]) -> None:
    found, room = drawn
    by_name = {each.name: each for each in found}
    turns = take_turns(found, room, NOW, LIMITS)
    ended = [worker for each in turns.yields for worker in each.workers]
    assert len(ended) == len(set(ended))
    for each in turns.yields:
        of, to = by_name[each.endpoint], by_name[each.to]
        assert to.needs
        assert to.name in turns.reserved
        assert to.waits_since is not None or (to.kept and of.idle_since is not None)
        if of.idle_since is None:
            assert of.turn_since is not None
            assert of.turn_since + LIMITS.turn_s <= NOW
        left = [claim.worker for claim in of.workers if claim.worker not in ended]
        assert len(left) >= min(of.least, len(of.workers))
        assert bool(left) == each.stays or len({one.to for one in turns.yields if one.endpoint == of.name}) > 1
    assert turns.look_at is None or turns.look_at > NOW


@given(contenders())
def test_what_is_reserved_fits(drawn: tuple[list[Contender], dict[int, float]]) -> None:
    """For those that do not wait any more, now; for those to whom others yield, once their workers have ended."""
    found, room = drawn
    turns = take_turns(found, room, NOW, LIMITS)
    assert_fit(found, turns, room, turns.reserved.keys() - turns.waits.keys())
    ended = {worker for each in turns.yields for worker in each.workers}
    for each in found:
        for claim in (*each.ending, *(claim for claim in each.workers if claim.worker in ended)):
            room = more(room, claim.devices, claim.share)
    assert_fit(found, turns, room, {each.to for each in turns.yields} | (turns.reserved.keys() - turns.waits.keys()))


def assert_fit(found: list[Contender], turns: Turns, room: Left, names: Collection[str]) -> None:
    for each in (each for each in found if each.name in names):
        for device in turns.reserved[each.name]:
            assert fits(1 - room[device], min(*each.needs, 1.0))
            room = less(room, [device], min(*each.needs, 1.0))


@given(contenders())
def test_fewer_would_not_be_enough(drawn: tuple[list[Contender], dict[int, float]]) -> None:
    """Without the yields nobody gets more than with them, and each of the first in line is needed."""
    found, room = drawn
    turns = take_turns(found, room, NOW, LIMITS)
    first = next(iter(turns.reserved), None)
    if first is None:
        return
    units = [each for each in turns.yields if each.to == first]
    needs = next(each.needs for each in found if each.name == first)
    ending = room
    for claim in (claim for each in found for claim in each.ending):
        ending = more(ending, claim.devices, claim.share)
    claims = {claim.worker: claim for each in found for claim in each.workers}
    for left_out in units:
        without = ending
        for claim in (claims[worker] for unit in units if unit is not left_out for worker in unit.workers):
            without = more(without, claim.devices, claim.share)
        assert placed(without, needs) is None


# Simulated servers.


def swaps_of(order: str, devices: int = 1) -> str:
    arrivals = [Arrival(number * 1e-3, name, 0.3) for number, name in enumerate(order)]
    return "".join(swap.endpoint for swap in World(sorted(set(order)), devices).run(arrivals).swaps)


def test_a_queue_of_mixed_requests_takes_a_swap_for_each_endpoint() -> None:
    assert swaps_of("ABAACABC") == "ABC"
    assert swaps_of("ABAACABC", devices=2) == "ABC"


def test_two_that_are_always_busy_take_turns() -> None:
    # Requests of 4 s, of each endpoint one every 2 s, for 5 minutes.
    arrivals = [Arrival(2.0 * number, name, 4.0) for number in range(150) for name in "AB"]
    outcome = World("AB", 1).run(arrivals)
    swaps = [swap.at for swap in outcome.swaps]
    assert len(outcome.waits) == 300
    # Each turn lasts 30 s, and the requests that run when it is over finish.
    assert min(later - swap for swap, later in pairwise(swaps[:-1])) >= 30
    assert max(outcome.waits) <= longest_wait_s(1, Limits(), 4.0, 0.55) + 1e-6


def test_clients_that_ask_one_question_after_another_are_not_swapped_for_each() -> None:
    # Answers of 0.5 s and pauses of 0.15 s.
    arrivals = [Arrival(0.65 * number, name, 0.5) for number in range(300) for name in "AB"]
    outcome = World("AB", 1).run(arrivals)
    assert len(outcome.swaps) <= 600 * 0.65 / 30


arrivals_of_any = st.lists(
    st.builds(
        Arrival,
        st.floats(0, 60).map(lambda at: round(at, 2)),
        st.sampled_from("ABCDE"),
        st.floats(0.01, 5).map(lambda runs: round(runs, 2)),
    ),
    max_size=40,
)


@given(arrivals_of_any, st.integers(1, 3), st.sampled_from([1.0, 5.0, 30.0]))
def test_nobody_waits_longer_than_the_bound_and_no_swap_is_in_vain(
    arrivals: list[Arrival], devices: int, turn_s: float
) -> None:
    limits = Limits(turn_s)
    world = World("ABCDE", devices, policy=lambda found, free, now: take_turns(found, free, now, limits))
    outcome = world.run(arrivals)
    assert len(outcome.waits) == len(arrivals)
    assert len(outcome.swaps) <= len(arrivals)
    longest = max((one.runs_s for one in arrivals), default=0)
    bound = longest_wait_s(4, limits, longest, world.start_s + world.end_s)
    assert max(outcome.waits, default=0) <= bound + 1e-6
    assert len(outcome.swaps) >= least_swaps(world, arrivals, max(outcome.waits, default=0)) - 1e-6


def test_devices_of_a_worker_are_on_one_node() -> None:
    room = {device: 1.0 for node in range(2) for device in on_node(node, (0, 1))}
    assert placed(room, [1.0, 2.0]) == ((0,), on_node(1, (0, 1)))
    assert placed(room, [1.0, 1.0, 1.0]) is not None
    assert placed(room, [3.0]) is None
