"""The request that a worker takes for the first in its engine's queue."""

from __future__ import annotations

import msgspec
import pytest

from components.workers.requests.admission import QueueHead
from dynamo_local.core.messages.presence import ClassUsage, Load
from dynamo_local.core.messages.work import RequestEpoch, Submit, TokenDelta


def submit(name: str, tokens: int, *, arrived: float = 0.0, priority: int = 0) -> Submit:
    return Submit(name, 1, "f", [0] * tokens, msgspec.Raw(b"\x80"), arrival_time=arrived, priority=priority)


def tokens(head: QueueHead, waiting: int | None, now: float = 0.0) -> int | None:
    """Tokens that the first of so many waiting requests needs."""
    return head.completed(Load(1, waiting), now).head_tokens


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
    assert tokens(head, 0) == 0
    assert tokens(head, None) is None
    assert tokens(QueueHead(), 1) is None


def test_of_those_that_bring_nothing_the_last_ones_wait(head: QueueHead) -> None:
    head.stepped([token("a")])
    # The prompt of b is being computed.
    assert tokens(head, 2) == 300
    assert tokens(head, 3) == 200
    # The engine's word and this one's may be of different moments.
    assert tokens(head, 9) == 200


def test_one_that_was_preempted_waits_with_all_that_it_has_brought(head: QueueHead) -> None:
    head.stepped([token("a"), token("b")])
    head.stepped([token("a")])
    assert tokens(head, 3) == 201


def test_priority_goes_before_arrival(head: QueueHead) -> None:
    head.taken(submit("urgent", 50, arrived=9.0, priority=-1))
    head.stepped([token("a")])
    assert tokens(head, 4) == 50


def test_who_has_finished_or_was_forgotten_does_not_wait(head: QueueHead) -> None:
    head.stepped([token("a"), token("b", finish="stop")])
    head.forgotten([RequestEpoch("c", 1), RequestEpoch("unknown", 1)])
    assert tokens(head, 1) == 400


def test_usage_is_told_by_class(head: QueueHead) -> None:
    head.taken(submit("urgent", 50, arrived=9.0, priority=-1))
    head.taken(submit("batch", 70, arrived=0.0, priority=3))
    head.stepped([token("a"), token("urgent")])
    # c, d and batch wait.
    load = head.completed(Load(3, 3), 1.0)
    assert load.by_class == (ClassUsage("high", 1, 51), ClassUsage("normal", 2, 301))
    head.forgotten([RequestEpoch(name, 1) for name in ("urgent", "a", "b", "c", "d")])
    assert head.completed(Load(1, 0), 1.0).by_class == (ClassUsage("background", 1, 70),)


def test_the_first_is_the_first_since_it_became_that(head: QueueHead) -> None:
    head.stepped([token("a")])
    assert head.completed(Load(2, 2), 1.0).head_since == 1.0
    load = head.completed(Load(2, 2), 2.0)
    assert (load.head_since, load.head_priority) == (1.0, 0)
    head.taken(submit("batch", 70, arrived=0.0, priority=3))
    assert head.completed(Load(4, 1), 3.0).head_priority == 3
    load = head.completed(Load(5, 0), 4.0)
    assert (load.head_since, load.head_priority, load.head_tokens) == (None, None, 0)
    assert head.completed(Load(4, 1), 5.0).head_since == 5.0


def test_what_waits_though_it_has_run_is_counted_once_for_each_preemption(head: QueueHead) -> None:
    def told(waiting: int) -> tuple[int | None, int | None]:
        load = head.completed(Load(1, waiting), 0.0)
        return load.preempted_tokens, load.recomputed_tokens

    head.stepped([token("a"), token("b")])
    assert told(2) == (0, 0)
    head.stepped([token("a")])
    assert told(3) == (201, 201)
    head.stepped([token("a")])
    assert told(3) == (201, 201)
    # It is computed again, and preempted once more.
    head.stepped([token("a"), token("b")])
    assert told(2) == (0, 201)
    head.stepped([token("a")])
    assert told(3) == (202, 403)
    head.forgotten([RequestEpoch("b", 1)])
    assert told(2) == (0, 403)
    assert head.completed(Load(None, None), 0.0).preempted_tokens is None
