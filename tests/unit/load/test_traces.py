"""Reading traces, and making loads of them."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import UsageError
from dynamo_local.load.workload.arrivals import Constant, Gamma
from dynamo_local.load.workload.lengths import PowerLaw, Uniform
from dynamo_local.load.workload.traces import parse_trace
from dynamo_local.load.workload.workload import Cut, Lengthwise, Planned, Sharing, drawn

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
