"""Requests that wait for slots: classes take turns, and so do keys within a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.priority.classes import PriorityClass, class_of
from dynamo_local.core.priority.fair_queue import LEAST_SHARE, Claim, FairQueue, in_turn


@dataclass(eq=False)
class Waiting:
    claim: Claim
    tokens: int
    over: bool = False

    @property
    def key(self) -> str:
        return self.claim.key


LONGEST = 100
KEYS = st.sampled_from(["", "a", "b", "c"])
PRIORITIES = st.sampled_from([-2, -1, 0, 1, 5])
REQUESTS = st.lists(st.tuples(KEYS, PRIORITIES, st.integers(1, LONGEST)), max_size=40)


def requests(drawn: Iterable[tuple[str, int, int]]) -> list[Waiting]:
    return [
        Waiting(Claim(priority, float(number), number, key), tokens)
        for number, (key, priority, tokens) in enumerate(drawn)
    ]


def queue_of(waiting: Iterable[Waiting]) -> FairQueue[Waiting]:
    queue = FairQueue[Waiting](lambda one: one.tokens, lambda one: one.over)
    for one in waiting:
        queue.add(one, one.claim)
    return queue


def popped(queue: FairQueue[Waiting], most: int | None = None) -> list[Waiting]:
    found: list[Waiting] = []
    while len(queue) and (most is None or len(found) < most):
        found.append(queue.pop())
    return found


@given(drawn=REQUESTS)
def test_each_is_served_once_and_a_key_in_order(drawn: list[tuple[str, int, int]]) -> None:
    waiting = requests(drawn)
    served = popped(queue_of(waiting))
    assert sorted(map(id, served)) == sorted(map(id, waiting))
    for key in {one.key for one in waiting}:
        for each in PriorityClass:
            of_key = [one.claim for one in served if one.key == key and class_of(one.claim.priority) is each]
            assert of_key == sorted(of_key)


@given(drawn=REQUESTS, key=KEYS)
def test_a_key_alone_in_one_class_gets_everything_as_vllm_orders_it(
    drawn: list[tuple[str, int, int]], key: str
) -> None:
    waiting = requests((key, abs(priority), tokens) for _, priority, tokens in drawn if priority)
    assert popped(queue_of(waiting)) == sorted(waiting, key=lambda one: one.claim)


@given(flood=st.integers(2, 60), tokens=st.integers(1, LONGEST), own=st.integers(1, LONGEST), before=st.integers(0, 30))
def test_a_single_request_waits_behind_one_of_a_flood_at_most(flood: int, tokens: int, own: int, before: int) -> None:
    queue = queue_of(requests([("flood", 0, tokens)] * flood))
    popped(queue, min(before, flood))
    late = Waiting(Claim(0, 1e6, 1_000, "late"), own)
    queue.add(late, late.claim)
    assert late in popped(queue, 2)


@given(
    lengths=st.dictionaries(KEYS, st.lists(st.integers(1, LONGEST), min_size=1), min_size=2),
    slots=st.integers(0, 60),
)
def test_keys_that_wait_get_as_many_tokens(lengths: dict[str, list[int]], slots: int) -> None:
    waiting = requests((key, 0, tokens) for key, each in lengths.items() for tokens in each)
    queue, used = queue_of(waiting), Counter[str]()
    for one in popped(queue, slots):
        used[one.key] += one.tokens
    still = [used[key] for key in {one.key for one in queue}]
    # Whoever is ahead is so by the last request that it was served.
    assert not still or max(still) - min(still) <= LONGEST


def test_what_a_key_generates_is_charged_while_another_waits() -> None:
    talker = requests([("talks", 0, 10)] * 4)
    queue = queue_of(talker)
    first = queue.pop()
    other = [Waiting(Claim(0, 100.0, 100 + number, "other"), 10) for number in range(4)]
    for one in other:
        queue.add(one, one.claim)
    first.tokens += 25
    assert [one.key for one in popped(queue, 5)] == ["other", "other", "other", "other", "talks"]


def test_a_key_gets_nothing_for_the_time_in_which_it_asked_for_nothing() -> None:
    queue = queue_of(requests([("busy", 0, 10)] * 50))
    popped(queue, 40)
    for number in range(10):
        late = Waiting(Claim(0, 100.0, 100 + number, "late"), 10)
        queue.add(late, late.claim)
    served = Counter(one.key for one in popped(queue, 10))
    assert abs(served["busy"] - served["late"]) <= 1


@given(drawn=REQUESTS, more=st.lists(st.tuples(KEYS, st.integers(1, LONGEST)), min_size=30, max_size=60))
def test_a_class_that_waits_gets_its_share(drawn: list[tuple[str, int, int]], more: list[tuple[str, int]]) -> None:
    background = requests([("batch", 1, 10)] * 10)
    queue = queue_of([*background, *requests((key, 0, tokens) for key, tokens in more)])
    served = [class_of(one.claim.priority) for one in popped(queue)]
    window = round(1 / LEAST_SHARE)
    waits = served[: len(served) - served[::-1].index(PriorityClass.BACKGROUND)]
    assert all(PriorityClass.BACKGROUND in waits[start : start + window] for start in range(len(waits) - window + 1))
    # As long as others wait it gets no more than that, and the slots that two classes may be due at.
    busy = served[: served.index(PriorityClass.NORMAL) + 1 + 30]
    assert busy.count(PriorityClass.BACKGROUND) <= 2


def test_what_does_not_fit_keeps_no_urgent_request_waiting_and_keeps_its_turn() -> None:
    queue = queue_of(requests([("", 1, 10), *[("", 0, 10)] * 40]))
    while class_of((large := queue.peek()).claim.priority) is not PriorityClass.BACKGROUND:
        queue.pop()
    urgent = Waiting(Claim(-1, 100.0, 100), 1)
    queue.add(urgent, urgent.claim)
    assert queue.peek() is urgent
    assert queue.pop() is urgent
    assert queue.peek() is large
    assert queue.peek() is large, "a normal request does not pass it"


@given(drawn=REQUESTS, number=st.integers(1, 10))
def test_who_could_not_begin_is_next_again(drawn: list[tuple[str, int, int]], number: int) -> None:
    waiting = requests((key, priority, tokens) for key, priority, tokens in drawn)
    queue, twin = queue_of(waiting), queue_of(waiting)
    skipped = popped(queue, number)
    for one in reversed(skipped):
        queue.put_back(one, one.claim)
    classes = [class_of(one.claim.priority) for one in popped(queue)]
    assert classes == [class_of(one.claim.priority) for one in popped(twin)]


def test_who_was_preempted_is_charged_with_what_came_on_top() -> None:
    first, second = requests([("a", 0, 10), ("a", 0, 10)])
    queue = queue_of([first, second])
    assert queue.pop() is first
    first.tokens = 12
    queue.add(first, first.claim)
    other = [Waiting(Claim(0, 100.0, 100 + number, "b"), 6) for number in range(3)]
    for one in other:
        queue.add(one, one.claim)
    # a has had 10 and is to have 2 more; b has had nothing.
    assert popped(queue, 3) == [other[0], other[1], first]


@given(running=REQUESTS, waiting=REQUESTS)
def test_one_of_a_lower_class_gives_way_to_the_first_of_the_highest_class(
    running: list[tuple[str, int, int]], waiting: list[tuple[str, int, int]]
) -> None:
    run, wait = requests(running), requests(waiting)
    queue = queue_of(run)
    popped(queue)
    for one in wait:
        queue.add(one, one.claim)
    # With nobody else there it came without any turn, and each of a lower class may give way.
    kept = [one for one in run if queue._served[one].by_turn]
    victim = queue.make_room(run)
    if victim is None:
        best = min((class_of(one.claim.priority).rank for one in wait), default=2)
        assert all(one in kept or class_of(one.claim.priority).rank <= best for one in run)
        return
    offered = queue.peek()
    assert victim not in kept
    assert class_of(victim.claim.priority).rank > class_of(offered.claim.priority).rank
    assert class_of(offered.claim.priority).rank == min(class_of(one.claim.priority).rank for one in wait)
    assert victim.claim == max(one.claim for one in run if one not in kept)
    # It does not come back for the one that it gave way to.
    assert queue.pop() is offered
    queue.add(victim, victim.claim)
    assert queue.gives_way([offered], class_of(victim.claim.priority)) is None


def test_nobody_gives_way_to_one_that_cannot_begin() -> None:
    running, *waiting = requests([("", 0, 1), ("a", -1, 1), ("a", -1, 1), ("b", -1, 1)])
    queue = queue_of([running])
    queue.pop()
    for one in waiting:
        queue.add(one, one.claim)
    assert queue.make_room([running], lambda _: False) is None
    assert queue.make_room([running], above=PriorityClass.HIGH) is None
    assert queue.make_room([running], lambda one: one is waiting[1], above=PriorityClass.NORMAL) is running
    assert queue.is_called
    assert queue.peek() is waiting[1]
    assert queue.make_room([running]) is running
    queue.remove(waiting[0])
    assert queue.peek() in waiting[1:], "the one that was called has left"


def test_background_work_keeps_its_share_of_slots_while_urgent_requests_take_them() -> None:
    slots = 4
    batch = requests([("batch", 1, 1)] * 30)
    queue, running = queue_of(batch), list[Waiting]()
    gave_way, ended, number = Counter[Waiting](), 0, 100
    while len(queue) and number < 2_000:
        # More urgent requests come than there are slots; each takes one round, and one of background takes ten.
        for _ in range(slots):
            number += 1
            urgent = Waiting(Claim(-1, float(number), number), 1)
            queue.add(urgent, urgent.claim)
        if len(running) == slots and (victim := queue.make_room(running)) is not None:
            running.remove(victim)
            gave_way[victim] += 1
            running.append(queue.pop())
            queue.add(victim, victim.claim)
        while len(running) < slots:
            running.append(queue.pop())
        over = {one for one in running if one.claim.priority < 0 or one.tokens == 10}
        ended += sum(one.claim.priority > 0 for one in over)
        for one in running:
            one.tokens += 1
        running = [one for one in running if one not in over]
    # Each round frees at most `slots` slots, one in twenty of which is a turn of background.
    assert ended >= len(batch) / 2
    assert max(gave_way.values(), default=0) <= 1


def test_who_leaves_is_not_offered_and_an_empty_queue_says_so() -> None:
    one, other = requests([("a", 0, 1), ("a", 0, 1)])
    queue = queue_of([one, other])
    assert queue.peek() is one
    queue.remove(one)
    assert one not in queue
    assert (queue.pop(), len(queue)) == (other, 0)
    with pytest.raises(IndexError):
        queue.peek()
    with pytest.raises(KeyError):
        queue.remove(one)


def test_memory_of_served_requests_and_keys_is_bounded() -> None:
    queue = queue_of([])
    for number in range(5_000):
        one = Waiting(Claim(0, float(number), number, f"key {number}"), 10, over=True)
        queue.add(one, one.claim)
        assert queue.pop() is one
    assert len(queue._served) <= 65
    assert len(queue._classes[PriorityClass.NORMAL]._used) <= 65


def test_those_that_wait_together_go_on_in_turn() -> None:
    waiting = requests([("a", 0, 1), ("a", 0, 1), ("a", 0, 1), ("b", 0, 1), ("a", -1, 1)])
    turn = in_turn(waiting, lambda one, _: one.claim, lambda one: one.tokens)
    assert [waiting.index(one) for one in turn] == [4, 0, 3, 1, 2]
