"""Latencies, rates, goodput, and what is said about them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import UsageError
from dynamo_local.load.figures import (
    CUT_OFF,
    NOT_SENT,
    Record,
    figures,
    most_at_once,
    notes,
    parse_objective,
    quantile,
    ratio_of_quantiles,
    resampled,
    spread,
)
from dynamo_local.load.quantities import parse_duration, shown_duration


def record(at_s: float = 0.0, **changes: Any) -> Record:
    """Sent 10 ms late; tokens after 100, 140 and 200 ms; ended 1 ms after the last."""
    sent_s = at_s + 0.01
    wanted: dict[str, Any] = {
        "sent_s": sent_s,
        "chunks_s": [sent_s + 0.1, sent_s + 0.14, sent_s + 0.2],
        "ended_s": sent_s + 0.201,
        "tokens": 3,
        "prompt_tokens": 7,
    }
    return Record(at_s, 7, 3, **{**wanted, **changes})


def failed(at_s: float = 0.0, error: str = "HTTP 429") -> Record:
    return record(at_s, chunks_s=[], tokens=0, error=error, prompt_tokens=None)


def not_sent(at_s: float = 0.0) -> Record:
    return Record(at_s, 7, 3, error=NOT_SENT)


def test_latencies_count_from_the_sending_and_the_lag_apart() -> None:
    one = record()
    assert one.lag_s == pytest.approx(0.01)
    assert one.ttft_s == pytest.approx(0.1)
    assert one.itl_s == pytest.approx(0.05)
    assert one.gaps_s == pytest.approx([0.04, 0.06])
    assert one.e2e_s == pytest.approx(0.201)


def test_several_tokens_in_a_chunk_are_shared_out() -> None:
    assert record(tokens=11).itl_s == pytest.approx(0.01)
    assert record(tokens=1, chunks_s=[0.1]).itl_s is None


def test_the_figures_of_a_mixed_load() -> None:
    records = [record(0), record(1), failed(2), failed(2.5, "disconnected"), not_sent(3), failed(3.5, CUT_OFF)]
    found = figures(records, 0.0, 4.0, parse_objective("ttft=1s"))
    assert (found.planned, found.completed, found.failed, found.cut_off) == (6, 2, 3, 1)
    assert found.errors == {"HTTP 429": 1, "disconnected": 1, NOT_SENT: 1}
    assert found.wall_s == 4.0
    assert found.offered_per_s == 1.5
    assert found.completed_per_s == 0.5
    assert found.output_tokens_per_s == 1.5
    assert found.input_tokens_per_s == 3.5
    assert found.ttft_s is not None
    assert found.ttft_s.count == 2
    assert found.gap_s is not None
    assert found.gap_s.count == 4
    assert found.lag_s is not None
    assert found.lag_s.count == 5
    assert found.goodput is not None
    assert (found.goodput.good, found.goodput.share, found.goodput.per_s) == (2, 0.4, 0.5)


def test_the_wall_time_reaches_to_the_last_answer() -> None:
    assert figures([record(0), record(9.9)], 0.0, 10.0).wall_s == pytest.approx(10.111)


def test_the_warm_up_counts_in_nothing() -> None:
    records = [failed(0.5), record(1.5, tokens=300), record(2.0), record(2.5)]
    assert figures(records, 2.0, 4.0) == figures(records[2:], 2.0, 4.0)
    assert figures(records, 2.0, 4.0).offered_per_s == 1.0


def test_no_requests_have_no_latencies() -> None:
    found = figures([], 0.0, 0.0, parse_objective("itl=1ms"))
    assert found.ttft_s is None
    assert found.completed_per_s == 0
    assert found.goodput is not None
    assert found.goodput.share == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=15))
def test_the_most_at_once_is_the_most_at_any_instant(spans: list[tuple[int, int]]) -> None:
    records = [record(sent_s=float(begin), ended_s=float(begin + length)) for begin, length in spans]
    counts = [sum(b <= instant + 0.5 < b + length for b, length in spans) for instant in range(41)]
    assert most_at_once(records) == max(counts)


@pytest.mark.parametrize(
    ("limits", "missed"),
    [
        ("ttft=100.1ms,itl=50.1ms,gap=60.1ms,e2e=202ms", ()),
        ("ttft=99ms", ("ttft",)),
        ("itl=49ms,gap=59ms", ("itl", "gap")),
        ("e2e=0.2", ("e2e",)),
    ],
)
def test_an_objective_is_missed_by_each_limit_that_is_not_kept(limits: str, missed: tuple[str, ...]) -> None:
    assert parse_objective(limits).missed(record()) == missed


def test_a_single_token_has_no_gap_to_be_too_long() -> None:
    assert parse_objective("itl=1ms,gap=1ms").missed(record(tokens=1, chunks_s=[0.1])) == ()


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=5x", "tfft=5ms", "ttft=1s,ttft=2s", "ttft=0s", "ttft=nan"])
def test_objectives_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_objective(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("250ms", 0.25), ("5m", 300), ("2min", 120), ("1h", 3600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)
    assert parse_duration(shown_duration(seconds)) == pytest.approx(seconds)


def noted(*records: Record, cpu: float = 0.1, is_closed: bool = False) -> str:
    return "\n".join(notes(figures(records, 0.0, 1.0), records, cpu, is_closed=is_closed))


def test_nothing_is_noted_of_a_sound_run() -> None:
    assert noted(*[record(index / 10) for index in range(200)]) == ""


@pytest.mark.parametrize(
    ("records", "cpu", "says"),
    [
        ([record(), not_sent()], 0.1, "1 requests were not sent"),
        ([record(sent_s=0.05)], 0.1, "the generator was late: p99 50 ms"),
        ([record()], 0.93, "the generator used 93% of a core"),
        ([record(0.01 * index) for index in range(40)], 0.1, "of 40 requests were still in flight"),
        ([record(tokens=2)], 0.1, "1 of 1 answers do not have the requested number of tokens"),
        ([record(prompt_tokens=None)], 0.1, "did not count tokens"),
        ([record(prompt_tokens=14)], 0.1, "counted 2.00 times the prompt tokens"),
        ([record(tokens=6)], 0.1, "chunks held 2.00 tokens"),
        ([record()], 0.1, "with 1 answers p99"),
    ],
)
def test_what_makes_figures_doubtful_is_noted(records: list[Record], cpu: float, says: str) -> None:
    assert says in noted(*records, cpu=cpu)


def test_a_closed_loop_is_always_behind() -> None:
    records = [record(0.01 * index) for index in range(40)]
    assert "in flight" not in noted(*records, is_closed=True)


# Quantiles, spreads, and the intervals of their ratios.

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


def test_quantiles_are_interpolated() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0], 0.25) == 1.5
    assert quantile([1.0, 2.0, 3.0], 1) == 3.0
    with pytest.raises(ValueError, match="no quantile"):
        quantile([], 0.5)


@given(values)
def test_a_spread_is_in_order_and_within_its_values(found: list[float]) -> None:
    measured = spread(found)
    assert measured is not None
    assert measured.count == len(found)
    assert min(found) <= measured.p50 <= measured.p90 <= measured.p95 <= measured.p99 <= measured.max == max(found)
    assert min(found) <= measured.mean <= max(found)


def test_nothing_measured_is_not_zero() -> None:
    assert spread([]) is None


def test_resampling_by_rank_is_resampling() -> None:
    found = sorted(random.Random(0).uniform(0, 1) for _ in range(30))
    draw = random.Random(1)
    by_rank = sorted(resampled(found, 0.9, draw) for _ in range(20_000))
    by_hand = sorted(sorted(draw.choices(found, k=30))[26] for _ in range(20_000))  # the 27th of 30
    for share in (0.05, 0.5, 0.95):
        # The replicates are values of the sample: at most a neighbour apart.
        place = int(share * 20_000)
        assert abs(found.index(by_rank[place]) - found.index(by_hand[place])) <= 1


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=30), st.floats(0.1, 10), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_run_that_takes_so_many_times_longer_has_that_ratio(found: list[float], factor: float, share: float) -> None:
    interval = ratio_of_quantiles(found, [value * factor for value in found], share, random.Random(0))
    assert interval is not None
    assert interval.estimate == pytest.approx(factor)
    assert interval.low <= interval.high


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(150):
        first, second = ([scale * draw.expovariate(1) for _ in range(200)] for scale in (1, 2))
        interval = ratio_of_quantiles(first, second, 0.9, draw)
        assert interval is not None
        held += interval.low <= 2 <= interval.high
    assert 132 <= held <= 150


def test_there_is_no_ratio_to_nothing() -> None:
    assert ratio_of_quantiles([], [1.0], 0.5, random.Random(0)) is None
    assert ratio_of_quantiles([1.0], [], 0.5, random.Random(0)) is None
    assert ratio_of_quantiles([0.0], [1.0], 0.5, random.Random(0)) is None
