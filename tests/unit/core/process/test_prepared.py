"""Which prepared processes are made and ended, and when again."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.process.restarts import (
    LIMITS,
    Attempts,
    ended,
    given_up,
    is_ready,
    missing_bytes,
    next_step,
    reordered,
)

KEYS = st.sampled_from("abcd")
NOW = 100.0


@given(
    ordered=st.dictionaries(KEYS, st.sampled_from([0.0, 99.0, 101.0, 105.0, math.inf])),
    running=st.frozensets(KEYS),
)
def test_what_is_ordered_is_made_when_it_is_due_and_all_else_ends(
    ordered: dict[str, float], running: frozenset[str]
) -> None:
    attempts = {key: Attempts(1, not_before=at) for key, at in ordered.items()}
    step = next_step(ordered, running, attempts, NOW)
    assert set(step.end) == running - set(ordered)
    due = {key for key, at in ordered.items() if key not in running and at <= NOW}
    assert (step.make in due) if due else (step.make is None)
    waiting = [at for key, at in ordered.items() if key not in running and key != step.make and at < math.inf]
    assert step.look_at == min(waiting, default=None)


def test_one_that_never_is_ready_is_given_up_until_it_is_ordered_anew() -> None:
    attempts = Attempts(1)
    for _ in range(LIMITS.max_failed_starts):
        assert attempts.not_before < math.inf
        attempts = ended(attempts, 1, NOW)
    assert attempts.not_before == math.inf
    assert reordered(attempts, 1) == attempts
    assert reordered(attempts, 2) == Attempts(2)


def test_one_that_cannot_be_forked_is_given_up_at_once() -> None:
    assert ended(Attempts(1), 2, NOW).not_before == given_up(Attempts(1)).not_before == math.inf


def test_one_that_was_ready_is_made_again_for_ever_later_and_later() -> None:
    attempts = Attempts(1)
    pauses = []
    for _ in range(20):
        attempts = ended(is_ready(attempts, NOW), -9, NOW)
        pauses.append(attempts.not_before - NOW)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (LIMITS.first_delay_s, LIMITS.max_delay_s)
    healthy = ended(is_ready(attempts, NOW), -9, NOW + LIMITS.healthy_after_s)
    assert healthy.not_before == NOW + LIMITS.healthy_after_s + LIMITS.first_delay_s


@given(weights=st.integers(0, 2**50), keep=st.integers(0, 2**40), free=st.integers(0, 2**50))
def test_weights_and_what_is_to_stay_free_fit_or_bytes_are_missing(weights: int, keep: int, free: int) -> None:
    missing = missing_bytes(free, weights, keep)
    assert missing >= 0
    assert (missing == 0) == (free - keep >= math.ceil(weights * 1.25))
    assert missing_bytes(free + missing, weights, keep) == 0
    assert missing_bytes(None, weights, keep) == 0
