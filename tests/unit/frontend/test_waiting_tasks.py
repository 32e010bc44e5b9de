"""Tasks that wait: owners take turns, each of them in order, and none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from components.frontend.async_tasks.waiting import KnownTask, WaitingTasks


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30))
def test_owners_take_turns_and_each_ones_tasks_go_in_order(added: list[tuple[str, bool]]) -> None:
    waiting = WaitingTasks()
    for number, (owner, is_late) in enumerate(added):
        waiting.add(KnownTask(owner, f"{number:03}", "m", again_at=9.0 if is_late else 0.0))
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
