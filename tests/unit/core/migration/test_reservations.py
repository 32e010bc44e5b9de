"""Room that a worker keeps for requests that are to move to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.core.migration.reservations import MOST_GUESTS, Reservations, Warmed

FIRST, SECOND = RequestEpoch("warm r", 1), RequestEpoch("warm r", 2)


def reserve(guests: Reservations, name: str = "r", blocks: int = 10, until: float = 9.0, slots: int = 2) -> str | None:
    return guests.reserve(name, "f", blocks, until, free_slots=slots, free_blocks=25)


def test_slots_and_blocks_are_promised_once() -> None:
    guests = Reservations()
    assert reserve(guests, "a") is None
    assert reserve(guests, "b") is None
    assert reserve(guests, "c") == "as many requests run there as it can run"
    assert reserve(guests, "c", slots=3) == "too little of its KV cache is free"
    assert reserve(guests, "c", blocks=5, slots=3) is None


def test_a_second_question_replaces_the_first() -> None:
    guests = Reservations()
    assert reserve(guests, blocks=20) is None
    assert reserve(guests, blocks=25, slots=1) is None
    assert guests.awaited == 1


def test_who_has_arrived_has_a_slot_of_its_own() -> None:
    guests = Reservations()
    assert reserve(guests, "a", slots=1) is None
    guests.arrive("a")
    assert guests.awaited == 0
    assert reserve(guests, "b", slots=1) is None


def test_a_guest_keeps_its_last_warm_blocks_until_it_leaves() -> None:
    guests = Reservations()
    assert guests.hold("r", Warmed(FIRST, [1, 2])) == [FIRST]
    reserve(guests)
    assert guests.hold("r", Warmed(FIRST, [1, 2])) == []
    assert guests.hold("r", Warmed(SECOND, [1, 2, 3])) == [FIRST]
    guests.arrive("r")
    assert guests.leave("r") == [SECOND]
    assert guests.leave("r") == []


def test_what_is_warm_is_told_to_a_context_that_goes_on_from_it() -> None:
    guests, warm = Reservations(), Warmed(FIRST, [1, 2, 3], "salt")
    reserve(guests)
    assert guests.warmed("r", [1, 2, 3, 4], "salt") is None
    guests.hold("r", warm)
    assert guests.warmed("r", [1, 2, 3, 4], "salt") == warm
    reserve(guests)
    assert guests.warmed("r", [1, 2, 3, 4], "salt") == warm
    assert guests.warmed("r", [1, 2, 3], "salt") is None
    assert guests.warmed("r", [1, 2, 4, 4], "salt") is None
    assert guests.warmed("r", [1, 2, 3, 4], "other") is None
    assert guests.warmed("other", [1, 2, 3, 4], "salt") is None
    guests.leave("r")
    assert guests.warmed("r", [1, 2, 3, 4], "salt") is None


def test_what_is_warm_with_one_adapter_is_not_for_another() -> None:
    guests, warm = Reservations(), Warmed(FIRST, [1, 2], None, "pirate")
    reserve(guests)
    guests.hold("r", warm)
    assert guests.warmed("r", [1, 2, 3], None, "pirate") == warm
    assert guests.warmed("r", [1, 2, 3], None, "robot") is None
    assert guests.warmed("r", [1, 2, 3]) is None


def test_who_does_not_come_in_time_leaves() -> None:
    guests = Reservations()
    reserve(guests, "a", until=3.0)
    reserve(guests, "r", until=5.0)
    guests.hold("r", Warmed(FIRST, [1]))
    assert guests.expire(4.0) == []
    assert not guests.expects("a")
    assert guests.expire(5.0) == [FIRST]
    assert guests.awaited == 0


def test_the_guests_of_a_frontend_are_known_until_they_leave() -> None:
    guests = Reservations()
    reserve(guests, "a")
    assert guests.reserve("b", "other", 5, 9.0, free_slots=2, free_blocks=25) is None
    guests.arrive("a")
    assert (guests.of_frontend("f"), guests.of_frontend("other")) == (["a"], ["b"])
    guests.leave("a")
    assert guests.of_frontend("f") == []


def test_guests_are_bounded() -> None:
    guests = Reservations()
    for number in range(MOST_GUESTS):
        assert guests.reserve(str(number), "f", 0, 9.0, 10_000, 10_000) is None
    assert guests.reserve("one more", "f", 0, 9.0, 10_000, 10_000) == "too many requests are to move there"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("reserve"), st.sampled_from("abcd"), st.integers(0, 12)),
            st.tuples(st.sampled_from(["hold", "arrive", "leave"]), st.sampled_from("abcd"), st.just(0)),
            st.tuples(st.just("expire"), st.just(""), st.integers(0, 40)),
        ),
        max_size=40,
    )
)
def test_promises_never_exceed_what_is_free_and_every_hold_is_let_go(script: list[tuple[str, str, int]]) -> None:
    guests = Reservations()
    promised: dict[str, int] = {}
    held: set[RequestEpoch] = set()
    for number, (what, name, amount) in enumerate(script):
        match what:
            case "reserve":
                until = float(number + amount)
                if guests.reserve(name, "f", amount, until, free_slots=3, free_blocks=20) is None:
                    promised[name] = amount
            case "hold":
                warm = RequestEpoch(f"warm {name}", number)
                held.add(warm)
                held -= set(guests.hold(name, Warmed(warm, [number])))
            case "arrive":
                guests.arrive(name)
                promised.pop(name, None)
            case "leave":
                held -= set(guests.leave(name))
            case _:
                held -= set(guests.expire(float(amount)))
        promised = {name: blocks for name, blocks in promised.items() if guests.expects(name)}
        assert guests.awaited == len(promised) <= 3
        assert sum(promised.values()) <= 20
    held -= set(guests.expire(1e9))
    assert held == set()
