"""Tasks that wait: owners take turns, each of them in order, and none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from components.frontend.async_tasks.waiting import KnownTask, Outcome, Place, WaitingTasks

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
    """Has room for so many tasks of one owner, of which there are 1,000. Times are in s."""

    def __init__(self, room: int) -> None:
        self.room = room
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
                self.waiting.put_down(PLACE, Outcome.REFUSED, now)

    def end(self, now: float) -> None:
        """One has its result."""
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
    assert model.tried < 3 * model.done + 256


def test_room_that_comes_is_found_while_no_task_ends() -> None:
    model = Model(0)
    for second in range(100):
        model.fill(float(second))
    assert model.tried < 256 + 20
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
    waiting.put_down(PLACE, Outcome.REFUSED, 0.0)
    assert [found and found.task for found in (waiting.pop(0.0), waiting.pop(0.0))] == ["3", None]
    found = waiting.pop(0.6)
    assert (found and found.task, waiting.in_hand, len(waiting)) == ("2", 2, 1)
