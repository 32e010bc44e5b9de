"""What a worker measures of its engine, by the steps of one."""

from __future__ import annotations

from components.workers.requests.counters import StepMeter
from dynamo_local.core.messages.presence import EngineRates, Load
from dynamo_local.core.messages.work import QUEUED, SCHEDULED, FinishReason, RequestEpoch, TokenDelta
from dynamo_local.core.ports import Step

EPOCH = RequestEpoch("r", 1)
FIRST = TokenDelta("r", 1, 0, [7], cached_tokens=0, events=((QUEUED, 9.0), (SCHEDULED, 0.5)))


def later(finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("r", 1, 1, [7], finish=finish)


def measured(*steps: tuple[float, TokenDelta, int]) -> EngineRates | None:
    """`steps`: when each ended, its only delta, and how many requests run then. The first token has taken 1,000. All of
    it is repeated, since few prompts tell nothing."""
    meter = StepMeter()
    for start in range(0, 800, 100):
        for at, delta, running in steps:
            computed = {EPOCH: 1_000} if delta.cached_tokens is not None else {}
            meter.stepped(Step(start + at, (delta,), Load(running=running)), computed)
        meter.stepped(Step(start + 99.0, (), Load()), {})
    return meter.rates(800.0)


def test_it_measures_prompts_from_their_admission_steps_that_decode_and_how_long_requests_run() -> None:
    rates = measured((10.5, FIRST, 1), (10.7, later(), 1), (10.9, later("stop"), 0))
    assert rates == EngineRates(prefill_s_per_token=0.0003, step_s=0.2, step_s_per_running=0.0, held_s=0.9)


def test_a_step_in_which_a_prompt_is_computed_as_well_is_no_step_that_decodes() -> None:
    rates = measured((10.5, FIRST, 2), (10.7, later(), 2))
    assert rates == EngineRates(prefill_s_per_token=0.0005)


def test_time_without_requests_belongs_to_no_step() -> None:
    rates = measured((10.5, later("stop"), 0), (90.0, later(), 1), (90.25, later(), 1))
    assert rates == EngineRates(step_s=0.25, step_s_per_running=0.0)


def test_a_request_that_is_cancelled_has_had_its_place_until_then() -> None:
    meter = StepMeter()
    meter.stepped(Step(10.5, (FIRST,), Load(running=1)), {EPOCH: 1_000})
    meter.forgotten([EPOCH, RequestEpoch("unknown", 1)], 12.0)
    meter.forgotten([EPOCH], 50.0)
    rates = meter.rates(60.0)
    assert rates is not None
    assert rates.held_s == 2.0


def test_an_engine_that_is_idle_for_long_has_measured_nothing() -> None:
    meter = StepMeter()
    for at in (10.0, 10.2):
        meter.stepped(Step(at, (later(),), Load(running=1)), {})
    assert meter.rates(70.0) == EngineRates(step_s=0.2, step_s_per_running=0.0)
    assert meter.rates(70.5) is None
    assert meter.rates(70.5) is None
