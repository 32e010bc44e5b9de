"""Turns of priority classes: the highest first, and each class its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.priority.classes import PriorityClass, class_of
from dynamo_local.core.priority.fair_queue import LEAST_SHARE, Turns

WINDOW = round(1 / LEAST_SHARE)
CLASSES = st.frozensets(st.sampled_from(PriorityClass))


def serve(turns: Turns, waiting: frozenset[PriorityClass]) -> PriorityClass | None:
    """Give one slot to a class that waits, as takers do: they learn that a class is empty only by asking it."""
    for one in turns.order():
        if one in waiting:
            turns.served(one)
            return one
        turns.nobody(one)
    return None


@given(steps=st.lists(CLASSES, max_size=200), begun=CLASSES)
def test_a_class_that_waits_gets_one_of_twenty_slots(
    steps: list[frozenset[PriorityClass]], begun: frozenset[PriorityClass]
) -> None:
    turns, passed = Turns(), dict.fromkeys(PriorityClass, 0)
    for waiting in steps:
        served = serve(turns, waiting | begun)
        for one in PriorityClass:
            passed[one] = 0 if one is served or one not in waiting | begun else passed[one] + (served is not None)
            assert passed[one] < WINDOW


@given(steps=st.lists(CLASSES, min_size=1, max_size=200))
def test_the_highest_is_served_unless_another_is_due(steps: list[frozenset[PriorityClass]]) -> None:
    turns = Turns()
    exceptions = 0
    for waiting in steps:
        served = serve(turns, waiting)
        highest = next((one for one in PriorityClass if one in waiting), None)
        exceptions += served is not highest
    assert exceptions <= 2 * len(steps) / (WINDOW - 1)


@pytest.mark.parametrize("others", [{"high"}, {"normal"}, {"high", "normal"}])
def test_background_work_that_always_waits_gets_its_share(others: set[str]) -> None:
    turns = Turns()
    waiting = frozenset(PriorityClass(name) for name in {*others, "background"})
    served = [serve(turns, waiting) for _ in range(10 * WINDOW)]
    for start in range(len(served) - WINDOW + 1):
        assert PriorityClass.BACKGROUND in served[start : start + WINDOW]
    assert served.count(PriorityClass.BACKGROUND) <= 0.07 * len(served)


@given(steps=st.lists(st.tuples(CLASSES, st.integers(1, 30)), max_size=60))
def test_slots_in_a_row_keep_the_share(steps: list[tuple[frozenset[PriorityClass], int]]) -> None:
    turns, passed = Turns(), 0
    for waiting, slots in steps:
        everybody = waiting | {PriorityClass.BACKGROUND}
        for one in turns.order():
            if one in everybody:
                got = min(slots, turns.row(one))
                assert got == 1 or one is next(each for each in PriorityClass if each in everybody)
                turns.served(one, got)
                passed = 0 if one is PriorityClass.BACKGROUND else passed + got
                assert passed < WINDOW
                break
            turns.nobody(one)


@given(number=st.integers())
def test_classes_are_ordered_as_priorities_are(number: int) -> None:
    order = list(PriorityClass)
    assert order.index(class_of(number)) <= order.index(class_of(number + 1))
    assert class_of(0) is PriorityClass.NORMAL
