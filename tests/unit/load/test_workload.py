"""Workloads: arrivals, lengths, traces, prompts."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import UsageError
from dynamo_local.load.workload import (
    WORDS,
    Alphabet,
    Arrivals,
    Constant,
    Cut,
    Gamma,
    Lengths,
    Lengthwise,
    Planned,
    PowerLaw,
    Prompts,
    Sharing,
    Sinusoid,
    Uniform,
    drawn,
    parse_arrivals,
    parse_lengths,
    parse_trace,
)

# Arrival processes: order, rate, spread.

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
def test_rates_that_the_command_line_takes(text: str, arrivals: Arrivals) -> None:
    assert parse_arrivals(text) == arrivals


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "nan", "inf", "x", "gamma:5", "gamma:5:0", "sine:5:60", "sine:9-5:60", "sine:0-0:9", "a:5"]
)
def test_rates_that_it_refuses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_arrivals(text)


# Distributions of lengths.

bounds = st.tuples(st.integers(1, 5000), st.integers(0, 5000)).map(lambda pair: (pair[0], sum(pair)))


@given(bounds, st.floats(0.01, 20), st.integers())
def test_a_power_law_keeps_its_bounds(limits: tuple[int, int], exponent: float, seed: int) -> None:
    draw = random.Random(seed)
    law = PowerLaw(exponent, *limits)
    assert all(limits[0] <= law.draw(draw) <= limits[1] for _ in range(20))


@given(bounds, st.integers())
def test_a_range_keeps_its_bounds(limits: tuple[int, int], seed: int) -> None:
    assert limits[0] <= Uniform(*limits).draw(random.Random(seed)) <= limits[1]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.5])
def test_lengths_are_as_frequent_as_the_power_law_says(exponent: float) -> None:
    law = PowerLaw(exponent, 4, 400)
    draw = random.Random(0)
    drawn = Counter(law.draw(draw) < 20 for _ in range(40_000))[True] / 40_000

    def area(low: float, high: float) -> float:
        """Under x ** -exponent, by the midpoints of many strips."""
        width = (high - low) / 200_000
        return width * math.fsum((low + (index + 0.5) * width) ** -exponent for index in range(200_000))

    assert drawn == pytest.approx(area(4, 20) / area(4, 401), abs=0.01)


def test_both_ends_are_drawn() -> None:
    draw = random.Random(0)
    assert {PowerLaw(2.0, 1, 3).draw(draw) for _ in range(200)} == {1, 2, 3}
    assert {Uniform(1, 3).draw(draw) for _ in range(200)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("512", Uniform(512, 512)), ("100-2000", Uniform(100, 2000)), ("power:2.0:16-4000", PowerLaw(2.0, 16, 4000))],
)
def test_lengths_that_the_command_line_takes(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, "--input") == lengths


@pytest.mark.parametrize("text", ["", "0", "-5", "5-", "9-5", "1.5", "power:2", "power:0:1-9", "power:99:1-9", "x:1"])
def test_lengths_that_it_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="--input"):
        parse_lengths(text, "--input")


# Reading traces, and making loads of them.

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def test_the_azure_traces_begin_at_their_first_request() -> None:
    lines = [AZURE, "2023-11-16 18:15:46.6805900,374,44\r\n", "2023-11-16 18:15:50.9309690,396,109"]
    first, second = parse_trace(lines)
    assert first == Planned(0.0, 374, 44)
    assert second.at_s == pytest.approx(4.250379, abs=1e-5)
    assert (second.input_tokens, second.output_tokens, second.blocks) == (396, 109, ())


def test_the_azure_trace_of_2024_has_time_zones() -> None:
    lines = ["\ufeff" + AZURE, "2024-05-10 23:59:59+00:00,1,2", "2024-05-11 00:00:00.500000+00:00,3,4"]
    assert [planned.at_s for planned in parse_trace(lines)] == [0.0, 1.5]


def test_mooncakes_trace_tells_of_shared_blocks() -> None:
    lines = [
        json.dumps({"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}),
        "\n",
        json.dumps({"timestamp": 1000, "input_length": 0, "output_length": 0, "hash_ids": []}),
    ]
    # By arrival; and no request is empty.
    assert parse_trace(lines) == [Planned(0.0, 1, 1), Planned(2.0, 700, 5, (0, 7))]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "no format known here"),
        (["a,b,c", "1,2,3"], "no format known here"),
        ([AZURE], "no requests"),
        ([AZURE, "2023-11-16 18:15:46,1,2", "yesterday,1,2"], "line 3 of the trace"),
        ([AZURE, "2023-11-16 18:15:46,1"], "line 2 of the trace"),
        ([AZURE, "2023-11-16 18:15:46,1,-2"], "line 2 of the trace: a length is negative"),
        (['{"timestamp": 0, "input_length": 1, "output_length": 1}', '{"timestamp": 0}'], "line 2 of the trace"),
        (["{"], "line 1 of the trace"),
    ],
)
def test_a_trace_that_cannot_be_read_names_the_line(lines: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_trace(lines)


plans = st.lists(
    st.builds(Planned, st.floats(0, 1e4), st.integers(1, 9000), st.integers(1, 900), st.just(tuple(range(20)))),
    max_size=20,
)


@given(plans, st.floats(0.1, 100), st.floats(0.1, 1e4), st.integers(1, 9000), st.integers(1, 900))
def test_a_cut_scales_times_and_caps_lengths(
    trace: list[Planned], speed: float, duration_s: float, max_input: int, max_output: int
) -> None:
    kept = Cut(speed, duration_s, max_input, max_output).apply(trace)
    assert len(kept) == sum(planned.at_s / speed < duration_s for planned in trace)
    for planned in kept:
        assert planned.at_s < duration_s
        assert planned.input_tokens <= max_input
        assert planned.output_tokens <= max_output
        assert 512 * (len(planned.blocks) - 1) < planned.input_tokens


def test_nothing_is_cut_that_was_not_asked_for() -> None:
    trace = [Planned(5.0, 700, 9, (1, 2))]
    assert Cut().apply(trace) == trace


def test_a_load_changes_only_in_what_was_changed() -> None:
    slow, fast = (list(drawn(Gamma(rate), Lengthwise(PowerLaw(2, 1, 99), Uniform(1, 9)), 50, 3)) for rate in (2, 20))
    short = min(len(slow), len(fast))
    assert short > 50
    assert [(p.input_tokens, p.output_tokens) for p in slow[:short]] == [
        (p.input_tokens, p.output_tokens) for p in fast[:short]
    ]
    other = list(drawn(Gamma(2), Lengthwise(Uniform(7, 7), Uniform(1, 9)), 50, 3))
    assert [p.at_s for p in other] == [p.at_s for p in slow]


def test_a_load_ends_with_its_duration() -> None:
    planned = list(drawn(Constant(2.0), Lengthwise(Uniform(1, 1), Uniform(1, 1)), 3.0, 0))
    assert [each.at_s for each in planned] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


def test_shared_beginnings_are_a_share_of_each_prompt_and_all_groups_occur() -> None:
    shape = Lengthwise(Uniform(10, 30), Uniform(1, 1), Sharing(0.5, 3))
    planned = list(shape.requests(range(100), random.Random(0)))
    assert all(each.shared_tokens == each.input_tokens // 2 for each in planned)
    assert {each.group for each in planned} == {0, 1, 2}


# Prompts: exact lengths, repeatable, equal beginnings exactly where they are asked for.

IDS = Alphabet(range(100, 1000), 0)
BLOCK = 512


def prompt(index: int, planned: Planned, seed: int = 0) -> list[int]:
    found = json.loads(Prompts(IDS, seed).write(index, planned))
    assert isinstance(found, list)
    return found


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)


@given(st.integers(1, 3000), st.integers(0, 9), st.floats(0, 1), st.integers(0, 3))
def test_lengths_are_exact_and_ids_are_of_the_vocabulary(tokens: int, blocks: int, share: float, index: int) -> None:
    found = prompt(index, Planned(0, tokens, 1, tuple(range(blocks)), int(tokens * share)))
    assert len(found) == tokens
    assert set(found) <= set(range(100, 1000))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.integers(1, BLOCK),
    st.integers(1, BLOCK),
)
def test_prompts_share_the_blocks_that_they_begin_with(a: list[int], b: list[int], last_a: int, last_b: int) -> None:
    first = prompt(0, Planned(0, BLOCK * (len(a) - 1) + last_a, 1, tuple(a)))
    second = prompt(1, Planned(0, BLOCK * (len(b) - 1) + last_b, 1, tuple(b)))
    equal_blocks = shared(a, b)
    wanted = min(BLOCK * equal_blocks, len(first), len(second))
    # What follows is drawn independently: a few tokens may be equal by chance.
    assert wanted <= shared(first, second) <= wanted + 5


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_group_begins_alike_and_goes_on_differently(first_share: int, second_share: int) -> None:
    first = prompt(0, Planned(0, 600, 1, (), first_share, group=1))
    second = prompt(1, Planned(0, 600, 1, (), second_share, group=1))
    other = prompt(2, Planned(0, 600, 1, (), second_share, group=2))
    wanted = min(first_share, second_share)
    assert wanted <= shared(first, second) <= wanted + 5
    assert shared(other, second) <= 5


def test_the_seed_and_the_index_make_the_prompt() -> None:
    planned = Planned(0, 50, 1)
    assert prompt(0, planned) == prompt(0, planned)
    assert shared(prompt(0, planned), prompt(1, planned)) <= 5
    assert shared(prompt(0, planned, seed=1), prompt(0, planned, seed=2)) <= 5


def test_text_has_as_many_words_as_asked_for() -> None:
    text = json.loads(Prompts(Alphabet(WORDS, 0), 0).write(0, Planned(0, 40, 1)))
    assert len(text.split(" ")) == 40
    assert set(text.split(" ")) <= set(WORDS)


def test_a_large_vocabulary_is_used_all_over() -> None:
    letters = {int(letter) for letter in Alphabet(range(1_000_000), 0).letters(random.Random(0), 2_000_000)}
    assert len(letters) == 65_536
    assert min(letters) < 1000
    assert max(letters) > 999_000


def test_an_alphabet_without_letters_is_refused() -> None:
    with pytest.raises(ValueError, match="letters"):
        Alphabet([], 0)
