"""Where a prompt is prefilled: remotely only if everything is known and speaks for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.request.disaggregation import PrefillDecision, PrefillLimits, PrefillReason, decide, worth_asking

LIMITS = PrefillLimits(max_local_prefill_length=100, max_prefill_queue_size=2)

tokens = st.integers(0, 100_000)
known_tokens = st.none() | tokens
counts = st.integers(0, 50)
limits = st.builds(PrefillLimits, st.integers(0, 5000), st.integers(0, 50))


@pytest.mark.parametrize(
    ("prompt", "cached", "waiting", "workers", "expected"),
    [
        (101, 0, 0, 1, PrefillDecision(remote=True, reason=PrefillReason.LONG)),
        (101, 0, 1, 1, PrefillDecision(remote=True, reason=PrefillReason.LONG)),
        (1000, 899, 0, 1, PrefillDecision(remote=True, reason=PrefillReason.LONG)),
        (100, 0, 0, 1, PrefillDecision(remote=False, reason=PrefillReason.SHORT)),
        (1000, 900, 0, 1, PrefillDecision(remote=False, reason=PrefillReason.CACHED)),
        (101, 0, 2, 1, PrefillDecision(remote=False, reason=PrefillReason.QUEUE_FULL)),
        (101, 0, 0, 0, PrefillDecision(remote=False, reason=PrefillReason.NO_WORKER)),
        (101, None, 0, 1, PrefillDecision(remote=False, reason=PrefillReason.UNKNOWN_CACHE)),
        (101, 0, None, 1, PrefillDecision(remote=False, reason=PrefillReason.UNKNOWN_QUEUE)),
    ],
)
def test_what_speaks_against_it(
    prompt: int, cached: int | None, waiting: int | None, workers: int, expected: PrefillDecision
) -> None:
    assert decide(prompt, cached, waiting, workers, LIMITS) == expected


@given(tokens, known_tokens, st.none() | counts, counts, limits)
def test_remote_if_and_only_if_all_of_it_is_known_and_holds(
    prompt: int, cached: int | None, waiting: int | None, workers: int, limits: PrefillLimits
) -> None:
    decision = decide(prompt, cached, waiting, workers, limits)
    assert decision.remote == (
        cached is not None
        and waiting is not None
        and prompt - cached > limits.max_local_prefill_length
        and waiting < limits.max_prefill_queue_size
        and workers > 0
    )
    assert decision.remote == (decision.reason is PrefillReason.LONG)


@given(tokens, tokens, counts, counts, limits)
def test_what_is_not_worth_asking_is_local_whatever_the_answers(
    prompt: int, cached: int, waiting: int, workers: int, limits: PrefillLimits
) -> None:
    if not worth_asking(prompt, limits):
        assert decide(prompt, cached, waiting, workers, limits) == PrefillDecision(
            remote=False, reason=PrefillReason.SHORT
        )


@given(tokens, tokens, counts, counts, limits, tokens)
def test_a_larger_cache_or_a_longer_queue_never_makes_it_remote(
    prompt: int, cached: int, waiting: int, workers: int, limits: PrefillLimits, more: int
) -> None:
    if not decide(prompt, cached, waiting, workers, limits).remote:
        assert not decide(prompt, cached + more, waiting, workers, limits).remote
        assert not decide(prompt, cached, waiting + more, workers, limits).remote


def test_a_queue_of_no_size_turns_remote_prefill_off() -> None:
    assert not decide(10_000, 0, 0, 8, PrefillLimits(0, 0)).remote
