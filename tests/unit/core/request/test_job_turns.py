"""Keys take turns at prefill jobs: a flood makes nobody wait behind all of it, and each job is taken once."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.priority.classes import PriorityClass, class_of
from dynamo_local.core.priority.fair_queue import Claim
from dynamo_local.core.request.disaggregation import JobTurns

JOBS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([-1, 0, 1])), max_size=30)


def waiting(jobs: list[tuple[str, int]]) -> JobTurns[int]:
    turns = JobTurns[int](lambda _: 10)
    for number, (key, priority) in enumerate(jobs):
        turns.add(number, Claim(priority, float(number), number, key))
    return turns


@given(jobs=JOBS, ended=st.sets(st.integers(0, 29)))
def test_each_job_that_has_not_ended_is_taken_once_and_in_its_class(
    jobs: list[tuple[str, int]], ended: set[int]
) -> None:
    turns = waiting(jobs)
    for number in ended:
        turns.discard(number)
    left = [number for number in range(len(jobs)) if number not in ended]
    places = {number: number for number in left}
    """Which prompt each job in the queue stands for."""
    taken = []
    for job in left:
        prompt = places[job]
        turn = turns.take(prompt)
        assert class_of(jobs[turn][1]) is class_of(jobs[job][1])
        assert turns.take(turn) == turn, "it has come out again"
        other = next(each for each, stands_for in places.items() if stands_for == turn)
        places[job], places[other] = turn, prompt
        taken.append(turn)
    assert sorted(taken) == left
    assert {turns.of(one) for one in PriorityClass} == {0}


@given(flood=st.integers(0, 40), late=st.integers(1, 5))
def test_a_key_waits_for_as_many_jobs_of_a_flood_as_it_has_itself(flood: int, late: int) -> None:
    turns = waiting([("flood", 0)] * flood + [("late", 0)] * late)
    assert turns.before(PriorityClass.NORMAL, "late") == late + min(flood, late + 1)
    assert turns.before(PriorityClass.NORMAL, "new") == min(flood, 1) + min(late, 1)
    order = [turns.take(min(turns_left)) for turns_left in _shrinking(turns, flood + late)]
    keys = ["flood" if number < flood else "late" for number in order]
    for at, key in enumerate(keys):
        before = Counter(keys[:at])
        if key == "late":
            assert before["flood"] <= before["late"] + 1
    assert [number for number in order if number >= flood] == list(range(flood, flood + late))


def _shrinking(turns: JobTurns[int], number: int) -> itertools.takewhile[list[int]]:
    """The jobs that wait, before each is taken."""
    return itertools.takewhile(bool, ([job for job in range(number) if job in turns] for _ in range(number)))


def test_the_longer_prompts_of_a_key_count_for_more() -> None:
    turns = JobTurns[int](lambda number: 100 if number < 4 else 10)
    for number in range(12):
        turns.add(number, Claim(0, float(number), number, "long" if number < 4 else "short"))
    order = [turns.take(min(left)) for left in _shrinking(turns, 12)]
    assert order.index(1) > 8, "ten short ones for a long one"
