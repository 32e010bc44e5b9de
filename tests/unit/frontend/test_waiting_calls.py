"""Receivers that wait to be called: bounds hold, and owners take turns, whatever the others have."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from components.frontend.async_tasks.keeper import KnownTask, WaitingCalls
from components.frontend.async_tasks.running import Outcome
from dynamo_local.core.async_tasks.callbacks import AT_ONCE, AT_ONCE_FOR_ORIGIN


def known(owner: str, number: int, receiver: str, again_at: float = 0.0) -> KnownTask:
    return KnownTask(owner, f"{number:05}", "m", receiver, again_at)


def test_no_more_than_so_many_are_called_at_once_and_owners_take_turns() -> None:
    waiting = WaitingCalls()
    for number in range(10_000):
        waiting.add(known("many", number, f"http://{number}"), 0.0)
    waiting.add(known("one", 10_000, "http://x"), 0.0)
    taken = list(iter(lambda: waiting.pop(0.0), None))
    assert (len(taken), taken[1].owner) == (AT_ONCE, "one")
    waiting.put_down(taken[0].place, Outcome.OTHER, 0.0)
    assert (waiting.pop(0.0) is not None, waiting.pop(0.0)) == (True, None)


def test_a_receiver_gets_so_many_calls_at_once_and_holds_up_no_other() -> None:
    waiting = WaitingCalls()
    for number in range(100):
        waiting.add(known("a", number, "http://slow"), 0.0)
    waiting.add(known("a", 100, "http://other"), 0.0)
    taken = list(iter(lambda: waiting.pop(0.0), None))
    assert Counter(each.receiver for each in taken) == {"http://slow": AT_ONCE_FOR_ORIGIN, "http://other": 1}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.booleans()), max_size=40))
def test_each_task_is_called_once_when_its_time_has_come(added: list[tuple[str, str, bool]]) -> None:
    waiting = WaitingCalls()
    tasks = [known(owner, n, receiver, 9.0 * late) for n, (owner, receiver, late) in enumerate(added)]
    for each in tasks:
        waiting.add(each, 0.0)
        waiting.add(each, 0.0)
    for removed in tasks[::5]:
        waiting.discard(removed)
    called: list[KnownTask] = []
    for now in (1.0, 9.0):
        while (found := waiting.pop(now)) is not None:
            assert found.again_at <= now
            called.append(found)
            waiting.put_down(found.place, Outcome.OTHER, now)
    kept = [each.task for each in tasks if each not in tasks[::5]]
    assert sorted(each.task for each in called) == kept
