"""The counters of a worker."""

from __future__ import annotations

from components.workers.requests.counters import Counters
from dynamo_local.core.messages.presence import Counts
from dynamo_local.core.messages.work import RequestEpoch, TokenDelta

EPOCH = RequestEpoch("r", 1)


def test_it_begins_with_nothing_which_is_known() -> None:
    assert Counters().counts == Counts(requests=0, prompt_tokens=0, output_tokens=0, prefill_s=0.0)


def test_tokens_that_were_cached_are_not_computed() -> None:
    counters = Counters(lambda: 0.0)
    counters.taken(EPOCH, 100)
    counters.computed([TokenDelta("r", 1, 0, [7], cached_tokens=64), TokenDelta("other", 1, 5, [1, 2])])
    counters.computed([TokenDelta("r", 1, 1, [8])])
    assert counters.counts == Counts(requests=1, prompt_tokens=36, output_tokens=4, prefill_s=0.0)


def test_a_prompt_counts_once_however_often_its_cached_tokens_are_told() -> None:
    counters = Counters(lambda: 0.0)
    counters.taken(EPOCH, 10)
    for position in range(3):
        counters.computed([TokenDelta("r", 1, position, [7], cached_tokens=4)])
    assert counters.counts.prompt_tokens == 6


def test_what_was_forgotten_before_its_first_token_was_not_computed_for_anybody() -> None:
    counters = Counters(lambda: 0.0)
    counters.taken(EPOCH, 10)
    counters.forgotten([EPOCH, RequestEpoch("unknown", 1)])
    counters.computed([TokenDelta("r", 1, 0, [7], cached_tokens=0)])
    assert counters.counts == Counts(requests=1, prompt_tokens=0, output_tokens=1, prefill_s=0.0)


def test_epochs_of_one_request_are_told_apart() -> None:
    counters = Counters(lambda: 0.0)
    counters.taken(EPOCH, 10)
    counters.taken(RequestEpoch("r", 2), 11)
    counters.computed([TokenDelta("r", 2, 1, [7], cached_tokens=1)])
    assert counters.counts == Counts(requests=2, prompt_tokens=10, output_tokens=1, prefill_s=0.0)


def test_it_is_at_work_on_prefills_from_the_first_that_comes_until_the_last_has_its_token() -> None:
    now = 10.0
    counters = Counters(lambda: now)
    now = 12.0
    counters.taken(EPOCH, 10)
    counters.taken(RequestEpoch("other", 1), 10)
    now = 13.0
    assert counters.counts.prefill_s == 1.0
    counters.computed([TokenDelta("r", 1, 0, [7], cached_tokens=0)])
    now = 13.5
    counters.forgotten([RequestEpoch("other", 1)])
    now = 20.0
    counters.computed([TokenDelta("r", 1, 1, [7])])
    assert counters.counts.prefill_s == 1.5
