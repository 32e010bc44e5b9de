"""Rates of engines: what a model of steps says is measured again, and compared without a difference by chance."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.fleet.rates import ASSUMED, RateMeter, compared
from dynamo_local.core.messages.presence import EngineRates

_some = st.one_of(st.none(), st.floats(1e-6, 10))
measured = st.lists(st.one_of(st.none(), st.builds(EngineRates, _some, _some, _some, _some)), max_size=6)


def test_nothing_is_known_before_a_step() -> None:
    assert RateMeter().rates is None


@pytest.mark.parametrize(
    ("base_s", "running_s", "token_s"), [(0.008, 1e-4, 5e-5), (0.1, 1e-3, 1e-3), (0.01, 1e-5, 1e-6)]
)
def test_a_model_of_steps_is_measured_again(base_s: float, running_s: float, token_s: float) -> None:
    meter, now, random = RateMeter(), 0.0, Random(1)
    for _ in range(300):
        running, tokens = random.randint(1, 64), random.randint(1, 8_000)
        meter.decoded(base_s + running * running_s, running)
        now += 1.0 + base_s + tokens * token_s
        meter.begun(now, [(now - base_s - tokens * token_s, tokens)])
        meter.ended(3.0)
    rates = meter.rates
    assert rates is not None
    assert rates.step_s == pytest.approx(base_s, rel=0.02)
    assert rates.step_s_per_running == pytest.approx(running_s, rel=0.02)
    assert rates.prefill_s_per_token == pytest.approx(token_s, rel=0.02)
    assert rates.held_s == 3.0


def test_prompts_of_one_length_take_a_step_and_their_tokens() -> None:
    meter = RateMeter()
    meter.decoded(0.01, 4, steps=100)
    for now in range(1, 50):
        meter.begun(now, [(now - 0.11, 1_000)])
    rates = meter.rates
    assert rates is not None
    assert rates.prefill_s_per_token == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize(("tokens", "told_after"), [(64, 40), (5_000, 6)])
def test_few_prompts_or_short_ones_tell_no_rate(tokens: int, told_after: int) -> None:
    meter, told = RateMeter(), 0
    while meter.rates is None:
        told += 1
        meter.begun(told, [(told - 0.1, tokens)])
    assert told >= told_after


def test_prompts_that_are_computed_together_share_the_time() -> None:
    meter = RateMeter()
    for now in range(1, 100):
        meter.begun(now, [(now - 0.1, 500), (now - 0.05, 500)])
        meter.begun(now + 0.1, [(now - 0.05, 1_000)])
    rates = meter.rates
    assert rates is not None
    assert rates.prefill_s_per_token == pytest.approx(1e-4, rel=0.05)


@given(measured, st.randoms())
def test_compared_rates_have_no_gaps_and_no_order(rates: list[EngineRates | None], random: Random) -> None:
    of_each = compared(rates)
    assert all(getattr(each, name) is not None for each in of_each for name in EngineRates.__struct_fields__)
    order = random.sample(range(len(rates)), len(rates))
    assert compared([rates[index] for index in order]) == [of_each[index] for index in order]


def test_a_worker_that_has_measured_nothing_is_as_the_others_and_small_differences_are_none() -> None:
    fast, about_as_fast, slow = EngineRates(1e-5), EngineRates(1.4e-5), EngineRates(9e-5)
    first, second, third, new = compared([fast, about_as_fast, slow, None])
    assert first == second == new
    assert third.prefill_s_per_token == 9e-5
    assert first.held_s == ASSUMED.held_s
