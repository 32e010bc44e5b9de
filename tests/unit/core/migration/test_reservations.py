"""Room that a worker keeps for requests that are to migrate to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.core.migration.reservations import MAX_RESERVATIONS, Reservations, Warmed

FIRST, SECOND = RequestEpoch("warm r", 1), RequestEpoch("warm r", 2)


def reserve(
    reservations: Reservations, name: str = "r", blocks: int = 10, until: float = 9.0, slots: int = 2
) -> str | None:
    return reservations.reserve(name, "f", blocks, until, free_slots=slots, free_blocks=25)


def test_slots_and_blocks_are_promised_once() -> None:
    reservations = Reservations()
    assert reserve(reservations, "a") is None
    assert reserve(reservations, "b") is None
    assert reserve(reservations, "c") == "as many requests run there as it can run"
    assert reserve(reservations, "c", slots=3) == "too little of its KV cache is free"
    assert reserve(reservations, "c", blocks=5, slots=3) is None


def test_a_second_question_replaces_the_first() -> None:
    reservations = Reservations()
    assert reserve(reservations, blocks=20) is None
    assert reserve(reservations, blocks=25, slots=1) is None
    assert reservations.awaited == 1


def test_a_request_that_has_arrived_has_a_slot_of_its_own() -> None:
    reservations = Reservations()
    assert reserve(reservations, "a", slots=1) is None
    reservations.arrive("a")
    assert reservations.awaited == 0
    assert reserve(reservations, "b", slots=1) is None


def test_the_last_warm_blocks_are_held_until_the_reservation_ends() -> None:
    reservations = Reservations()
    assert reservations.hold("r", Warmed(FIRST, [1, 2])) == [FIRST]
    reserve(reservations)
    assert reservations.hold("r", Warmed(FIRST, [1, 2])) == []
    assert reservations.hold("r", Warmed(SECOND, [1, 2, 3])) == [FIRST]
    reservations.arrive("r")
    assert reservations.leave("r") == [SECOND]
    assert reservations.leave("r") == []


def test_what_is_warm_is_told_to_a_context_that_goes_on_from_it() -> None:
    reservations, warm = Reservations(), Warmed(FIRST, [1, 2, 3], "salt")
    reserve(reservations)
    assert reservations.warmed("r", [1, 2, 3, 4], "salt") is None
    reservations.hold("r", warm)
    assert reservations.warmed("r", [1, 2, 3, 4], "salt") == warm
    reserve(reservations)
    assert reservations.warmed("r", [1, 2, 3, 4], "salt") == warm
    assert reservations.warmed("r", [1, 2, 3], "salt") is None
    assert reservations.warmed("r", [1, 2, 4, 4], "salt") is None
    assert reservations.warmed("r", [1, 2, 3, 4], "other") is None
    assert reservations.warmed("other", [1, 2, 3, 4], "salt") is None
    reservations.leave("r")
    assert reservations.warmed("r", [1, 2, 3, 4], "salt") is None


def test_what_is_warm_with_one_adapter_is_not_for_another() -> None:
    reservations, warm = Reservations(), Warmed(FIRST, [1, 2], None, "pirate")
    reserve(reservations)
    reservations.hold("r", warm)
    assert reservations.warmed("r", [1, 2, 3], None, "pirate") == warm
    assert reservations.warmed("r", [1, 2, 3], None, "robot") is None
    assert reservations.warmed("r", [1, 2, 3]) is None


def test_a_reservation_ends_in_time_though_its_request_does_not_come() -> None:
    reservations = Reservations()
    reserve(reservations, "a", until=3.0)
    reserve(reservations, "r", until=5.0)
    reservations.hold("r", Warmed(FIRST, [1]))
    assert reservations.expire(4.0) == []
    assert not reservations.expects("a")
    assert reservations.expire(5.0) == [FIRST]
    assert reservations.awaited == 0


def test_the_guests_of_a_frontend_are_known_until_they_leave() -> None:
    reservations = Reservations()
    reserve(reservations, "a")
    assert reservations.reserve("b", "other", 5, 9.0, free_slots=2, free_blocks=25) is None
    reservations.arrive("a")
    assert (reservations.of_frontend("f"), reservations.of_frontend("other")) == (["a"], ["b"])
    reservations.leave("a")
    assert reservations.of_frontend("f") == []


def test_guests_are_bounded() -> None:
    reservations = Reservations()
    for number in range(MAX_RESERVATIONS):
        assert reservations.reserve(str(number), "f", 0, 9.0, 10_000, 10_000) is None
    assert reservations.reserve("one more", "f", 0, 9.0, 10_000, 10_000) == "too many requests are to move there"


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
    reservations = Reservations()
    promised: dict[str, int] = {}
    held: set[RequestEpoch] = set()
    for number, (what, name, amount) in enumerate(script):
        match what:
            case "reserve":
                until = float(number + amount)
                if reservations.reserve(name, "f", amount, until, free_slots=3, free_blocks=20) is None:
                    promised[name] = amount
            case "hold":
                warm = RequestEpoch(f"warm {name}", number)
                held.add(warm)
                held -= set(reservations.hold(name, Warmed(warm, [number])))
            case "arrive":
                reservations.arrive(name)
                promised.pop(name, None)
            case "leave":
                held -= set(reservations.leave(name))
            case _:
                held -= set(reservations.expire(float(amount)))
        promised = {name: blocks for name, blocks in promised.items() if reservations.expects(name)}
        assert reservations.awaited == len(promised) <= 3
        assert sum(promised.values()) <= 20
    held -= set(reservations.expire(1e9))
    assert held == set()
