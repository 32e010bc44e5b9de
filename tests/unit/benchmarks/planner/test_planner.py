"""What the benchmark of the planner says of requests, devices and arms."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.cycles import Answer, Cycle, Limits, Made, Outing, Swing, cycles_of, together
from benchmarks.planner.device_time import Held, device_seconds
from benchmarks.planner.fleet import DEVICES, FIRST, FITTED, Arm, Layout, parse_arm
from benchmarks.planner.planner import _saved
from benchmarks.planner.report import against, report
from dynamo_local.core.errors import UsageError
from dynamo_local.core.planning.options import PlannerOptions

LIMITS = Limits(ttft_s=2.0, itl_s=0.05)
SWING = Swing(low=1.0, high=3.0, period_s=100.0, cycles=2)
GOOD = Answer(0.0, 1.0, 0.04, 7.0, 150)


def sent(at_s: float, ttft_s: float = 1.0, itl_s: float = 0.04, error: str = "") -> Answer:
    return Answer(at_s, ttft_s, itl_s, ttft_s + 149 * itl_s, 150, error)


def outing(arm: str, *answers: Answer, devices: int = 4, seed: int = 1, changes: tuple[Made, ...] = ()) -> Outing:
    held = [Held(0.0, devices // 2, devices - devices // 2)]
    return Outing(arm, seed, SWING, {}, list(answers), held, list(changes), 0.5)


def whole_cycle(arm: str, *answers: Answer, devices: int = 4) -> Cycle:
    return cycles_of(outing(arm, *answers, devices=devices), LIMITS)[0]


held_times = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8).map(
    lambda each: [Held(at, prefill, decode) for at, prefill, decode in sorted(each)]
)


def test_a_device_counts_from_when_it_is_claimed_until_it_is_released() -> None:
    held = [Held(0.0, 1, 1), Held(10.0, 2, 1), Held(30.0, 1, 1)]
    assert device_seconds(held, 0.0, 40.0) == 2 * 10 + 3 * 20 + 2 * 10
    assert device_seconds(held, 20.0, 25.0) == 15
    assert device_seconds(held, 35.0, 50.0) == 30


def test_what_was_held_before_the_first_look_is_what_it_saw() -> None:
    assert device_seconds([Held(5.0, 1, 2)], 0.0, 10.0) == 30
    with pytest.raises(ValueError, match="nothing is known"):
        device_seconds([], 0.0, 1.0)


@given(held_times, st.lists(st.floats(0, 120), min_size=2, max_size=6).map(sorted))
def test_device_seconds_add_up_and_lie_within_what_was_held(held: list[Held], edges: list[float]) -> None:
    parts = [device_seconds(held, begin, end) for begin, end in itertools.pairwise(edges)]
    assert sum(parts) == pytest.approx(device_seconds(held, edges[0], edges[-1]), abs=1e-6)
    seconds = edges[-1] - edges[0]
    assert -1e-6 <= sum(parts) <= seconds * max(each.devices for each in held) + 1e-6


def test_the_load_begins_and_ends_at_its_lowest_and_is_the_same_for_the_same_seed() -> None:
    times = list(itertools.takewhile(lambda at_s: at_s < SWING.seconds, SWING.times(random.Random(1))))
    assert times == sorted(times)
    fifths = Counter(int(at_s % SWING.period_s // 20) for at_s in times)
    assert fifths[2] > 1.5 * max(fifths[0], fifths[4])
    assert times == list(itertools.takewhile(lambda at_s: at_s < SWING.seconds, SWING.times(random.Random(1))))


def test_a_request_belongs_to_the_cycle_in_which_it_was_to_be_sent() -> None:
    first, second = cycles_of(outing("2P2D", *(sent(at) for at in (0.0, 99.9, 100.0, 199.9, 200.0))), LIMITS)
    assert [answer.at_s for answer in first.answers] == [0.0, 99.9]
    assert [answer.at_s for answer in second.answers] == [100.0, 199.9]
    assert (first.seconds, first.device_s, first.devices) == (100.0, 400.0, 4.0)


def test_good_is_what_kept_both_limits_and_did_not_fail() -> None:
    late, slow, failed = sent(60.0, ttft_s=2.1), sent(60.0, itl_s=0.06), sent(60.0, error="timeout")
    cycle = whole_cycle("2P2D", sent(60.0), late, slow, failed)
    assert (cycle.good, cycle.first_in_time, cycle.steady, cycle.failed) == (1, 2, 2, 1)
    assert cycle.good_per_device_hour == pytest.approx(3600 / 400)
    assert cycle.tokens == 450


def test_limits_are_kept_by_what_equals_them_and_missed_by_what_never_came() -> None:
    assert whole_cycle("2P2D", sent(60.0, 2.0, 0.05)).good == 1
    assert whole_cycle("2P2D", Answer(60.0, None, None, 1.0, 0)).good == 0


def test_cycles_together_weigh_by_their_requests_and_seconds() -> None:
    whole = together(cycles_of(outing("2P2D", sent(60.0), sent(160.0, 3.0), sent(161.0)), LIMITS))
    assert (whole.good, len(whole.answers), whole.device_s, whole.devices) == (2, 3, 800.0, 4.0)


def test_ratios_are_of_cycles_with_the_same_requests() -> None:
    mine = {(1, 0): whole_cycle("planner", sent(60.0), sent(61.0), devices=3), (2, 0): whole_cycle("planner", GOOD)}
    other = {(1, 0): whole_cycle("2P2D", sent(60.0), sent(61.0, ttft_s=3.0))}
    found = against(mine, {"planner": mine, "2P2D": other})
    assert set(found) == {"2P2D"}
    assert found["2P2D"]["good requests"].estimate == 2.0
    assert found["2P2D"]["devices"].estimate == 0.75
    assert found["2P2D"]["TTFT, times faster"].estimate == pytest.approx(2.0)


def test_the_report_counts_the_changes_of_its_cycles_and_can_be_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (
        Made(60.0, "add a decode worker", 9.0, True),
        Made(160.0, "add a decode worker", 9.0, False),
        Made(201.0, "remove scaled_VllmWorker_1", 2.0, True),  # the load is over
    )
    requests = (sent(60.0), sent(160.0))
    outings = [outing("planner", *requests, changes=changes), outing("2P2D", *requests)]
    path = tmp_path / "runs.json"
    path.write_bytes(msgspec.json.encode(report(outings, LIMITS)))
    printed = capsys.readouterr().out
    (planner,) = (line for line in printed.splitlines() if line.startswith("| planner"))
    assert [cell.strip() for cell in planner.split("|")][-3:-1] == ["0.5", "0"]
    assert _saved(path) == outings
    report(_saved(path), LIMITS)
    assert capsys.readouterr().out == printed


def test_what_is_no_saved_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"figures": 1}')
    with pytest.raises(UsageError, match="holds no saved runs"):
        _saved(path)
    with pytest.raises(UsageError, match="holds no saved runs"):
        _saved(tmp_path / "absent.json")


def test_the_fitted_settings_are_ones_that_the_planner_has() -> None:
    PlannerOptions(**{name.removeprefix("Planner.").replace("-", "_"): value for name, value in FITTED.items()})


def test_arms() -> None:
    assert parse_arm("2P3D") == Arm("2P3D", Layout(2, 3))
    assert parse_arm("planner") == Arm("planner", FIRST, "load")
    assert parse_arm("planner:freeness").policy == "freeness"
    assert parse_arm("planner:fitted") == Arm("planner:fitted", FIRST, "load", fitted=True)
    for wrong in ("0P1D", "2D2P", f"{DEVICES}P1D", "planner:best"):
        with pytest.raises(UsageError, match="is no arm"):
            parse_arm(wrong)
