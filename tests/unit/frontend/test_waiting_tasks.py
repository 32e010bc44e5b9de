"""Tasks that wait: owners take turns, each of them in order, and none is lost."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.frontend.async_tasks.keeper import KnownTask, Place, WaitingTasks
from components.frontend.async_tasks.running import Outcome

PLACE = Place("a", "m", "")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30))
def test_owners_take_turns_and_each_ones_tasks_go_in_order(added: list[tuple[str, bool]]) -> None:
    waiting = WaitingTasks()
    for number, (owner, is_late) in enumerate(added):
        waiting.add(KnownTask(owner, f"{number:03}", "m", again_at=9.0 if is_late else 0.0), 0.0)
    first: list[KnownTask] = []
    while (found := waiting.pop(1.0)) is not None:
        first.append(found)
    assert sorted(each.task for each in first) == [f"{n:03}" for n, (_, is_late) in enumerate(added) if not is_late]
    for owner in "abc":
        mine = [each.task for each in first if each.owner == owner]
        assert mine == sorted(mine)
    # While others wait, nobody has two turns more than they.
    for begin in range(len(first)):
        left = {each.owner for each in first[begin:]}
        nearest = {each.owner for each in first[begin : begin + len(left)]}
        assert nearest == left
    assert len(waiting) == sum(is_late for _, is_late in added)
    assert sum(1 for _ in iter(lambda: waiting.pop(9.0), None)) == sum(is_late for _, is_late in added)


class Model:
    """Has room for so many tasks of one owner, of which there are 1,000. Times are in s. `refusal`: what comes of one
    for which there is none."""

    def __init__(self, room: int, refusal: Outcome = Outcome.REFUSED) -> None:
        self.room, self.refusal = room, refusal
        self.tried = self.done = 0
        self.waiting = WaitingTasks()
        self.running: list[KnownTask] = []
        for number in range(1000):
            self.waiting.add(KnownTask("a", f"{number:03}", "m"), 0.0)

    def fill(self, now: float, most: int = 256) -> None:
        """Take what may be taken; those beyond the room are refused."""
        tried = []
        while self.waiting.in_hand < most and (known := self.waiting.pop(now)) is not None:
            tried.append(known)
        self.tried += len(tried)
        self.running += tried[: self.room - len(self.running)]
        for known in tried:
            if known not in self.running:
                self.waiting.add(known, now)
                self.waiting.put_down(PLACE, self.refusal, now)

    def end(self, now: float) -> None:
        """Note that a task has its result."""
        self.running.pop()
        self.done += 1
        self.waiting.put_down(PLACE, Outcome.ANSWERED, now)


def test_what_is_refused_waits_without_being_tried_again_and_again() -> None:
    model = Model(5)
    for second in range(600):
        model.fill(float(second))
        assert len(model.running) == min(5, 1000 - model.done)
        model.end(float(second))
    assert (model.done, len(model.waiting)) == (600, 395 + 1)
    assert model.tried < 3 * model.done + 2 * 256


@pytest.mark.parametrize(("refusal", "tried"), [(Outcome.REFUSED, 2 * 256 + 10 * 16), (Outcome.CLOSED, 256 + 10 * 16)])
def test_room_that_comes_is_found_while_no_task_ends(refusal: Outcome, tried: int) -> None:
    model = Model(0, refusal)
    for second in range(100):
        model.fill(float(second))
    assert model.tried < tried
    model.room = 100
    for second in range(100, 140):
        model.fill(float(second))
    assert len(model.running) == 100


def test_an_owner_that_is_refused_holds_up_nobody_else() -> None:
    waiting = WaitingTasks()
    for owner, number in (("a", 1), ("a", 2), ("b", 3)):
        waiting.add(KnownTask(owner, str(number), "m"), 0.0)
    first = waiting.pop(0.0)
    assert first is not None
    waiting.add(first, 0.0)
    waiting.put_down(PLACE, Outcome.CLOSED, 0.0)
    assert [found and found.task for found in (waiting.pop(0.0), waiting.pop(0.0))] == ["3", None]
    found = waiting.pop(0.6)
    assert (found and found.task, waiting.in_hand, len(waiting)) == ("2", 2, 1)


PLACES, RUN_S, GOOD, BAD = 80, 30.0, 1000, 200
IDEAL_S = GOOD / PLACES * RUN_S


class Bursts:
    """A model with so many places, of one owner, which answers each task after RUN_S. Those whose name begins with
    `bad` are refused for themselves. Times are in s."""

    def __init__(self, names: list[str]) -> None:
        self.waiting = WaitingTasks()
        self.begun: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.tried = 0
        self._running: list[tuple[float, str]] = []
        for name in names:
            self.waiting.add(KnownTask("a", name, "m"), 0.0)

    def run(self, until_s: float, bad_until_s: float) -> None:
        """Run until then. `bad_until_s`: when the bad ones may be granted."""
        now = 0.0
        while now < until_s:
            while self._running and self._running[0][0] <= now:
                self.ended[heapq.heappop(self._running)[1]] = now
                self.waiting.put_down(PLACE, Outcome.ANSWERED, now)
            while self.waiting.in_hand < PLACES and (known := self.waiting.pop(now)) is not None:
                self.tried += 1
                if known.task.startswith("bad") and now < bad_until_s:
                    self.waiting.add(known, now)
                    self.waiting.put_down(PLACE, Outcome.REFUSED, now)
                else:
                    self.begun[known.task] = now
                    heapq.heappush(self._running, (now + RUN_S, known.task))
            now += 0.5


@pytest.mark.parametrize("bad_until_s", [float("inf"), IDEAL_S / 4])
def test_tasks_that_are_refused_for_themselves_hold_up_no_others(bad_until_s: float) -> None:
    bad, good = [f"bad {n}" for n in range(BAD)], [f"good {n:04}" for n in range(GOOD)]
    model = Bursts(bad + good)
    model.run(1.5 * IDEAL_S, bad_until_s)
    assert model.begun[good[0]] == 0.0
    assert max(model.begun[name] for name in good[:PLACES]) <= 1.0
    assert max(model.ended[name] for name in good) <= 1.1 * IDEAL_S + RUN_S
    assert (len(model.ended) - GOOD, len(model.waiting)) == ((0, BAD) if bad_until_s > IDEAL_S else (BAD, 0))
    assert model.tried < 3 * (GOOD + BAD)


def test_many_that_are_refused_for_themselves_are_passed_by_and_by() -> None:
    model = Bursts([f"bad {n}" for n in range(3 * BAD)] + ["good"])
    model.run(600.0, float("inf"))
    assert model.ended["good"] < 600.0
    assert model.tried < 2 * 3 * BAD


def test_each_task_is_tried_once_where_all_are_refused() -> None:
    model = Bursts(["bad 1", "bad 2", "bad 3"])
    model.run(0.5, float("inf"))
    assert model.tried == 3
    model.run(60.0, float("inf"))
    assert model.tried < 3 * 10


@pytest.mark.parametrize(("outcome", "begun_at"), [(Outcome.ANSWERED, 5000.0), (Outcome.REFUSED, 0.0)])
def test_patience_begins_anew_with_each_result_of_the_line(outcome: Outcome, begun_at: float) -> None:
    waiting = WaitingTasks()
    for task in ("1", "2"):
        waiting.add(KnownTask("a", task, "m"), 0.0)
    refused, other = waiting.pop(0.0), waiting.pop(0.0)
    assert refused is not None
    assert other is not None
    refused.tries.begin(0.0)
    waiting.add(refused, 0.0)
    waiting.put_down(PLACE, Outcome.REFUSED, 0.0)
    waiting.put_down(PLACE, outcome, 5000.0)
    assert waiting.pop(9000.0) is refused
    assert refused.tries.first_at == begun_at
