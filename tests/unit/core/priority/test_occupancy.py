"""Bounds on what is under way: by class, and no key keeps the others out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.priority.classes import BEYOND, Occupancy, PriorityClass, ahead_of, class_of, may_come, share_of

KEYS = st.sampled_from(["", "a", "b", "c"])
COMING = st.lists(st.tuples(KEYS, st.sampled_from([-1, 0, 1]), st.integers(1, 4)), max_size=80)


@given(coming=COMING, bound=st.integers(1, 20))
def test_bounds_hold_and_who_has_less_than_a_share_may_come(coming: list[tuple[str, int, int]], bound: int) -> None:
    taken, admitted = Occupancy(), list[tuple[str, int, int]]()
    for key, priority, asked in coming:
        one = class_of(priority)
        ahead = [each for each in admitted if class_of(each[1]) in ahead_of(one)]
        has, keys = sum(each[2] for each in ahead if each[0] == key), {key, *(each[0] for each in ahead)}
        total = asked + sum(each[2] for each in ahead)
        let_in = may_come(asked, key, one, bound, taken)
        assert let_in or total > bound, "there was room"
        assert not let_in or total <= BEYOND * bound
        if total <= BEYOND * bound and len(keys) > 1 and has + asked <= bound // len(keys):
            assert let_in, "it has less than its share"
        if let_in and total > bound:
            assert has + asked <= max(bound // len(keys), 1)
        if let_in:
            taken.add(priority, key, asked)
            admitted.append((key, priority, asked))
    assert taken.total == sum(each[2] for each in admitted)


@given(asked=st.lists(st.integers(1, 4), max_size=30), bound=st.integers(1, 20))
def test_a_key_alone_gets_the_whole_bound_and_no_more(asked: list[int], bound: int) -> None:
    taken = Occupancy()
    for each in asked:
        if may_come(each, "a", PriorityClass.NORMAL, bound, taken):
            taken.add(0, "a", each)
        else:
            assert taken.total + each > bound
    assert taken.total <= bound


@given(
    coming=st.lists(st.tuples(st.integers(0, 2), KEYS, st.sampled_from([-1, 0, 1]), st.integers(1, 4)), max_size=40),
    asks=st.tuples(KEYS, st.sampled_from([-1, 0, 1]), st.integers(1, 4)),
    bound=st.integers(1, 20),
)
def test_it_does_not_matter_which_frontend_has_what(
    coming: list[tuple[int, str, int, int]], asks: tuple[str, int, int], bound: int
) -> None:
    parts, together = [Occupancy() for _ in range(3)], Occupancy()
    for where, key, priority, number in coming:
        parts[where].add(priority, key, number)
        together.add(priority, key, number)
    key, priority, asked = asks
    one = class_of(priority)
    assert may_come(asked, key, one, bound, *parts) == may_come(asked, key, one, bound, together)
    assert share_of(key, one, bound, *parts) == share_of(key, one, bound, together)


def test_a_flood_leaves_another_key_its_share_in_whichever_part_it_lies() -> None:
    flying, held = Occupancy(), Occupancy()
    flying.add(0, "flood", 7)
    held.add(0, "flood", 3)
    assert not may_come(1, "flood", PriorityClass.NORMAL, 10, flying, held)
    for _ in range(5):
        assert may_come(1, "late", PriorityClass.NORMAL, 10, flying, held)
        held.add(0, "late", 1)
    assert not may_come(1, "late", PriorityClass.NORMAL, 10, flying, held)
    share = share_of("late", PriorityClass.NORMAL, 10, flying, held)
    assert (share.has, share.share, share.keys) == (5, 5, 2)
    flying.add(0, "flood", -7)
    held.add(0, "flood", -3)
    assert share_of("late", PriorityClass.NORMAL, 10, flying, held).keys == 1
