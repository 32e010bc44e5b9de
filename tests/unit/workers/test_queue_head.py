"""The request that a worker takes for the first in its engine's queue."""

from __future__ import annotations

import msgspec
import pytest

from components.workers.requests.queue_head import QueueHead
from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import RequestEpoch, Submit


def submit(name: str, tokens: int, *, arrived: float = 0.0, priority: int = 0) -> Submit:
    return Submit(name, 1, "f", [0] * tokens, msgspec.Raw(b"\x80"), arrival_time=arrived, priority=priority)


def token(name: str, **more: object) -> TokenDelta:
    return TokenDelta(name, 1, 0, [7], **more)  # type: ignore[arg-type]


@pytest.fixture
def head() -> QueueHead:
    """The queue of four requests, submitted in this order."""
    head = QueueHead()
    for number, name in enumerate("abcd", 1):
        head.taken(submit(name, number * 100, arrived=float(number)))
    return head


def test_nothing_is_needed_where_nothing_waits_and_unknown_stays_unknown(head: QueueHead) -> None:
    assert head.tokens(0) == 0
    assert head.tokens(None) is None
    assert QueueHead().tokens(1) is None


def test_of_those_that_bring_nothing_the_last_ones_wait(head: QueueHead) -> None:
    head.stepped([token("a")])
    # The prompt of b is being computed.
    assert head.tokens(2) == 300
    assert head.tokens(3) == 200
    # The engine's word and this one's may be of different moments.
    assert head.tokens(9) == 200


def test_one_that_was_preempted_waits_with_all_that_it_has_brought(head: QueueHead) -> None:
    head.stepped([token("a"), token("b")])
    head.stepped([token("a")])
    assert head.tokens(3) == 201


def test_priority_goes_before_arrival(head: QueueHead) -> None:
    head.taken(submit("urgent", 50, arrived=9.0, priority=-1))
    head.stepped([token("a")])
    assert head.tokens(4) == 50


def test_who_has_finished_or_was_forgotten_does_not_wait(head: QueueHead) -> None:
    head.stepped([token("a"), token("b", finish="stop")])
    head.forgotten([RequestEpoch("c", 1), RequestEpoch("unknown", 1)])
    assert head.tokens(1) == 400
