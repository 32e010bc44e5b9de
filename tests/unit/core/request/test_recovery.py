"""A request goes on elsewhere unless that would change its output, and not for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.request.recovery import (
    CLEARING_TOKENS,
    COMPANY_DEATHS,
    LOST,
    Fidelity,
    Recovery,
    RecoveryDeadlines,
    Survival,
    backoff_s,
    verdict_after_loss,
)

DEADLINES = RecoveryDeadlines(fruitless_epochs=4)
survivals = st.sampled_from([Survival(fidelity, "seed") for fidelity in Fidelity])


@given(st.integers(0, 10_000), survivals, st.integers(0, 3))
def test_what_survives_goes_on_and_what_has_sent_nothing_starts_anew(
    position: int, survival: Survival, fruitless: int
) -> None:
    verdict = verdict_after_loss(position, survival, fruitless, DEADLINES)
    assert (verdict is None) == (position == 0 or survival.fidelity is not Fidelity.NONE)


@given(st.integers(0, 10_000), survivals, st.integers(4, 100))
def test_nothing_goes_on_for_ever(position: int, survival: Survival, fruitless: int) -> None:
    assert verdict_after_loss(position, survival, fruitless, DEADLINES) is not None


def test_the_parameter_that_forbids_it_is_named() -> None:
    verdict = verdict_after_loss(3, Survival(Fidelity.NONE, "seed"), 0, DEADLINES)
    assert verdict is not None
    assert "seed" in verdict


def test_unknown_is_not_exact() -> None:
    assert verdict_after_loss(1, LOST, 0, DEADLINES) is not None


@given(st.integers(0, 1000))
def test_pauses_grow_to_a_bound(fruitless: int) -> None:
    assert 0 <= backoff_s(fruitless) <= backoff_s(fruitless + 1) <= 2.0


def test_the_first_loss_costs_no_pause() -> None:
    assert backoff_s(0) == backoff_s(1) == 0
    assert backoff_s(2) == pytest.approx(0.05)


def test_epochs_without_a_token_are_counted_and_their_workers_remembered() -> None:
    recovery = Recovery()
    for worker in "abcd":
        recovery.begin_epoch(0, 1.0)
        recovery.lose(worker, 0)
    assert (recovery.fruitless, recovery.avoid) == (4, ("b", "c", "d"))
    recovery.begin_epoch(0, 1.0)
    recovery.lose("e", 1)
    assert (recovery.fruitless, recovery.avoid) == (0, ("c", "d", "e"))


def test_missing_tokens_are_asked_for_once_in_an_interval() -> None:
    recovery = Recovery()
    asked_at = [now for now in (10.0, 10.5, 11.0, 11.5, 12.0) if recovery.ask_resend(now, 1.0)]
    assert asked_at == [10.0, 11.0, 12.0]


def test_a_suspect_is_cleared_by_tokens_of_its_own_epoch() -> None:
    recovery = Recovery()
    recovery.begin_epoch(0, 1.0)
    recovery.accept(CLEARING_TOKENS)
    for _ in range(COMPANY_DEATHS):
        recovery.engine_died()
    recovery.begin_epoch(CLEARING_TOKENS, 2.0)
    recovery.accept(2 * CLEARING_TOKENS - 1)
    assert recovery.standing.suspect
    recovery.accept(2 * CLEARING_TOKENS)
    assert not recovery.standing.suspect
