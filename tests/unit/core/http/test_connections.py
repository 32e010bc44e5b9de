"""Room for connections: never more than there is, and only those that wait for their clients make room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.bounds.connections import GRACE_S, ConnectionSlots, is_due

steps = st.lists(
    st.tuples(st.sampled_from(["enter", "served", "waits", "leave"]), st.integers(0, 5), st.floats(0, 2 * GRACE_S)),
    max_size=60,
)


@given(st.integers(1, 4), steps)
def test_nobody_has_to_leave_who_is_served_or_has_just_come(size: int, moves: list[tuple[str, int, float]]) -> None:
    room, now = ConnectionSlots[int](size), 0.0
    inside: set[int] = set()
    waiting: dict[int, float] = {}
    for what, who, later in moves:
        now += later
        if what == "enter" and who not in inside:
            entered, leaving = room.enter(who, now)
            ripe = {other for other, since in waiting.items() if now - since >= GRACE_S}
            assert entered == (len(inside) < size or bool(ripe))
            assert (leaving is not None) == (len(inside) == size and entered)
            if leaving is not None:
                assert leaving in ripe
                assert waiting[leaving] == min(waiting.values())
                inside.discard(leaving)
                del waiting[leaving]
            if entered:
                inside.add(who)
                waiting[who] = now
        elif what == "served":
            room.served(who)
            waiting.pop(who, None)
        elif what == "waits":
            room.waits(who, now)
            if who in inside:
                waiting.setdefault(who, now)
        elif what == "leave":
            room.leave(who)
            inside.discard(who)
            waiting.pop(who, None)
        assert len(room) == len(inside) <= size


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_of_several_processes_some_are_due_and_none_that_has_more_than_its_part(has: list[int]) -> None:
    due = [own for at, own in enumerate(has) if is_due(own, has[:at] + has[at + 1 :])]
    assert min(has) in due
    assert all(own <= sum(has) / len(has) for own in due)


@given(st.integers(1, 5), st.integers(0, 60))
def test_who_is_due_takes_the_next_and_all_have_their_parts(processes: int, connections: int) -> None:
    has = [0] * processes
    for _ in range(connections):
        taker = max(at for at, own in enumerate(has) if is_due(own, has[:at] + has[at + 1 :]))
        has[taker] += 1
    assert max(has) - min(has) <= 1
