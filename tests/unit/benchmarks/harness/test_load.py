"""What a turn of a load tells."""

from __future__ import annotations

import pytest

from benchmarks.harness.accounting import Usage
from benchmarks.harness.client import Completion
from benchmarks.harness.load import Load

ANSWERED = Completion(sent_s=0.5, chunks_s=[1.0, 2.0, 3.0, 4.0], ended_s=4.0, tokens=8)
LATE = Completion(sent_s=2.5, chunks_s=[2.75, 3.25], ended_s=3.25, tokens=2)
FAILED = Completion(sent_s=2.0, ended_s=2.5, failure="the connection was lost")


def load(*records: Completion) -> Load:
    return Load(records, 2.0, 4.0, Usage({}, 0.0, 0.0, 2.0))


def test_tokens_of_a_time_are_a_share_of_all() -> None:
    assert load(ANSWERED).tokens_per_s == 2.0
    assert load(FAILED).tokens_per_s == 0.0
    assert load(ANSWERED, LATE, FAILED).tokens == 10


def test_latencies_count_from_the_beginning_of_the_time() -> None:
    turn = load(ANSWERED, LATE, FAILED)
    assert turn.ttfts_s == [0.25]
    assert turn.steps_s == [0.5]
    assert turn.gaps_s == [1.0, 1.0, 0.5]
    assert turn.tokens_took_s == [pytest.approx(3.5 / 8), pytest.approx(0.75 / 2)]


def test_requests_that_failed_are_told_and_not_counted_as_ended() -> None:
    turn = load(LATE, FAILED)
    assert turn.requests_per_s == 0.5
    assert turn.failures == ["the connection was lost"]
