from __future__ import annotations

from itertools import accumulate

import pytest

from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.worker import Agenda, DynamoTiming, MockerTiming, StepWork, Timing

TIMINGS = [DynamoTiming(1_048_576), MockerTiming(MockerSettings())]


@pytest.mark.parametrize("timing", TIMINGS)
def test_many_decode_steps_take_as_long_as_each_of_them(timing: Timing) -> None:
    singles = [timing.step_s(StepWork(0, 3, 1_000 + 3 * step)) for step in range(200)]
    for steps, total in enumerate(accumulate(singles), start=1):
        assert timing.decode_s(StepWork(0, 3, 1_000), steps) == pytest.approx(total)


@pytest.mark.parametrize(
    ("work", "took_ms"),
    [
        # Requests alone, first and second token; two prompts at once; a prompt beside a decoding request.
        (StepWork(1, 0, 0), 16.516604),
        (StepWork(8_192, 0, 0), 169.136918),
        (StepWork(0, 1, 8_193), 6.160433),
        (StepWork(0, 1, 100_001), 10.656738),
        (StepWork(4_000, 0, 0), 83.9712),
        (StepWork(2_000, 1, 1_004), 48.5523 + 5.7916),
    ],
)
def test_dynamos_simulator_takes_the_same_time(work: StepWork, took_ms: float) -> None:
    assert DynamoTiming(1_048_576).step_s(work) * 1e3 == pytest.approx(took_ms, abs=1e-3)


def test_actions_run_in_order_of_time_and_late_ones_after_all_others_of_their_time() -> None:
    agenda, done = Agenda(), list[str]()
    agenda.at(1.0, lambda: done.append("late"), late=True)
    agenda.at(2.0, lambda: done.append("last"))
    agenda.at(1.0, lambda: done.append("first"))

    def second() -> None:
        done.append("second")
        agenda.at(1.0, lambda: done.append("entered meanwhile"))

    agenda.at(1.0, second)
    agenda.run()
    assert done == ["first", "second", "entered meanwhile", "late", "last"]
    assert agenda.now == 2.0
