"""Whatever was lost on the way can be sent again, until the frontend says that it has it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.work import RequestEpoch, TokenDelta
from dynamo_local.core.request.log import Outbox, RequestLog

R = RequestEpoch("r", 1)


def produced(sizes: list[int], first: int = 0) -> list[TokenDelta]:
    """Deltas of so many tokens each, the last one with the finish; the tokens are their positions."""
    deltas, position = [], first
    for size in sizes:
        deltas.append(TokenDelta("r", 1, position, list(range(position, position + size))))
        position += size
    return [*deltas[:-1], msgspec.structs.replace(deltas[-1], finish="stop")]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20), st.data())
def test_a_log_that_lost_any_messages_is_completed_by_what_is_sent_again(sizes: list[int], data: st.DataObject) -> None:
    outbox = Outbox()
    assert outbox.open(R, "f", 0)
    kept = outbox.get(R)
    assert kept is not None
    log = RequestLog("r", [1])
    log.assign("w")
    for delta in produced(sizes):
        kept.add(delta, now=1.0)
        if data.draw(st.booleans(), label="arrives"):
            log.accept(delta)
        if data.draw(st.booleans(), label="acknowledged"):
            kept.trim(log.position)
    for delta in kept.since(R, log.position):
        log.accept(delta)
    assert log.tokens == list(range(sum(sizes)))
    assert log.finished


def test_before_there_is_anything_there_is_a_sign_of_life() -> None:
    outbox = Outbox()
    outbox.open(R, "f", 7)
    kept = outbox.get(R)
    assert kept is not None
    assert kept.since(R, 7) == (TokenDelta("r", 1, 7, []),)


def test_what_is_acknowledged_is_not_kept() -> None:
    outbox = Outbox()
    outbox.open(R, "f", 0)
    kept = outbox.get(R)
    assert kept is not None
    for delta in produced([2, 2, 2]):
        kept.add(delta, now=1.0)
    kept.trim(3)
    assert [delta.position for delta in kept.deltas] == [2, 4]
    kept.trim(6)
    assert [delta.finish for delta in kept.deltas] == ["stop"]


def test_a_submission_that_comes_twice_is_one() -> None:
    outbox = Outbox()
    assert outbox.open(R, "f", 0)
    assert not outbox.open(R, "f", 0)


def test_running_finished_and_forgotten() -> None:
    outbox = Outbox()
    other = RequestEpoch("s", 1)
    outbox.open(R, "f", 0)
    outbox.open(other, "g", 0)
    kept = outbox.get(R)
    assert kept is not None
    kept.add(produced([1])[0], now=5.0)
    assert outbox.running() == {other: "g"}
    assert outbox.of_frontend("f") == [R]
    assert outbox.finished_before(5.0) == []
    assert outbox.finished_before(5.1) == [R]
    assert outbox.forget([R, other, RequestEpoch("unknown", 1)]) == [other]
    assert len(outbox) == 0


def test_ends_without_an_answer_are_sent_again_the_oldest_first() -> None:
    outbox = Outbox()
    ends = {}
    for number, name in enumerate(["a", "b", "c", "runs"]):
        request = RequestEpoch(name, 1)
        outbox.open(request, f"f{number}", 0)
        kept = outbox.get(request)
        assert kept is not None
        kept.add(TokenDelta(name, 1, 0, [7]), now=1.0)
        if name != "runs":
            ends[name] = f"f{number}", TokenDelta(name, 1, 1, [8], finish="stop")
            kept.add(ends[name][1], now=2.0 + number)
    assert outbox.resend_ends(now=10.0, sent_before=2.0, most=9) == []
    assert outbox.resend_ends(now=10.0, sent_before=9.0, most=2) == [ends["a"], ends["b"]]
    assert outbox.resend_ends(now=11.0, sent_before=9.0, most=2) == [ends["c"]]
    assert outbox.resend_ends(now=12.0, sent_before=10.5, most=9) == [ends["a"], ends["b"]]
    outbox.forget([RequestEpoch("a", 1)])
    assert outbox.resend_ends(now=20.0, sent_before=20.0, most=9) == [ends["c"], ends["b"]]
    # Telling it again does not make it younger.
    assert outbox.finished_before(4.5) == [RequestEpoch("b", 1), RequestEpoch("c", 1)]


def test_what_is_held_is_the_engines_until_it_is_forgotten() -> None:
    outbox = Outbox()
    other = RequestEpoch("s", 1)
    outbox.open(R, "f", 0, held=True)
    outbox.open(other, "f", 0)
    assert outbox.held() == [R]
    for request in (R, other):
        kept = outbox.get(request)
        assert kept is not None
        kept.add(produced([1])[0], now=5.0)
    assert outbox.running() == {}
    assert outbox.held() == [R]
    assert outbox.forget([R, other]) == [R]
    assert outbox.held() == []
    assert outbox.forget([R]) == []
