"""Arrival processes: order, rate, spread."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import UsageError
from dynamo_local.load.workload.arrivals import Arrivals, Constant, Gamma, Sinusoid, parse_arrivals

rates = st.floats(0.1, 1000)
processes = st.one_of(
    st.builds(Constant, rates),
    st.builds(Gamma, rates, st.floats(0.1, 5)),
    st.builds(Sinusoid, st.floats(0, 1), st.floats(1, 100), st.floats(0.1, 1000)),
)


def first(arrivals: Arrivals, count: int, seed: int = 0) -> list[float]:
    return list(itertools.islice(arrivals.times(random.Random(seed)), count))


@given(processes, st.integers())
def test_times_never_fall_and_are_a_function_of_the_seed(arrivals: Arrivals, seed: int) -> None:
    times = first(arrivals, 50, seed)
    assert times[0] >= 0
    assert times == sorted(times)
    assert times == first(arrivals, 50, seed)


@pytest.mark.parametrize("arrivals", [Constant(4.0), Gamma(4.0), Gamma(4.0, 0.5), Gamma(4.0, 3.0), Sinusoid(1, 7, 10)])
def test_the_mean_rate_is_the_one_asked_for(arrivals: Arrivals) -> None:
    assert len(list(itertools.takewhile(lambda at_s: at_s < 5000, arrivals.times(random.Random(1))))) == pytest.approx(
        20_000, rel=0.06
    )


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
def test_gaps_have_the_coefficient_of_variation_asked_for(cv: float) -> None:
    gaps = [later - earlier for earlier, later in itertools.pairwise(first(Gamma(10.0, cv), 40_000))]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.05)


def test_constant_arrivals_do_not_drift() -> None:
    assert first(Constant(10.0), 100_001)[-1] == 10_000.0


def test_the_sine_swings_between_its_rates() -> None:
    sine = Sinusoid(0.0, 20.0, 100.0)
    assert [sine.rate_at(at_s) for at_s in (0, 25, 75)] == pytest.approx([10, 20, 0])
    times = itertools.takewhile(lambda at_s: at_s < 10_000, sine.times(random.Random(0)))
    phases = [at_s % 100 for at_s in times]
    crest = sum(20 <= phase < 30 for phase in phases)
    trough = sum(70 <= phase < 80 for phase in phases)
    # The integrals of the rate over these phases, times a hundred periods.
    assert crest == pytest.approx(19_836, rel=0.05)
    assert trough == pytest.approx(164, rel=0.4)


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("5", Gamma(5.0)),
        ("0.25", Gamma(0.25)),
        ("poisson:5", Gamma(5.0)),
        ("constant:5", Constant(5.0)),
        ("gamma:5:2.5", Gamma(5.0, 2.5)),
        ("sine:1-10:60", Sinusoid(1.0, 10.0, 60.0)),
        ("sine:0-10:5m", Sinusoid(0.0, 10.0, 300.0)),
    ],
)
def test_what_the_command_line_takes(text: str, arrivals: Arrivals) -> None:
    assert parse_arrivals(text) == arrivals


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "nan", "inf", "x", "gamma:5", "gamma:5:0", "sine:5:60", "sine:9-5:60", "sine:0-0:9", "a:5"]
)
def test_what_it_refuses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_arrivals(text)
