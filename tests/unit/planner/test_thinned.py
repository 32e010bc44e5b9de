"""Thinned curves: straight lines between the kept points reproduce the dropped ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.planner.tensorboard import Thinned

Points = Sequence[tuple[float, Mapping[str, float]]]
_pulls = st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.0, 1.0, 2.5])), max_size=40)


def thin(pulls: Points, kept_every_s: float = 60.0) -> list[tuple[float, dict[str, float]]]:
    curves = Thinned(kept_every_s)
    points = [point for at, numbers in pulls for point in curves.take(at, numbers)]
    return points + curves.finish()


def of_curve(points: Points, name: str) -> list[tuple[float, float]]:
    return [(at, numbers[name]) for at, numbers in points if name in numbers]


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    before = max(point for point in points if point[0] <= at)
    after = min(point for point in points if point[0] >= at)
    share = 0.0 if before == after else (at - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])


@given(_pulls)
def test_every_number_lies_on_the_lines_between_the_points_that_are_kept(found: list[dict[str, float]]) -> None:
    pulls = [(float(second), numbers) for second, numbers in enumerate(found)]
    kept = thin(pulls, kept_every_s=7.0)
    for name in "abc":
        points = of_curve(kept, name)
        assert points == sorted(set(points))
        for at, number in of_curve(pulls, name):
            assert interpolated(points, at) == number


@given(_pulls)
def test_nothing_is_kept_that_was_not_there(found: list[dict[str, float]]) -> None:
    pulls = [(float(second), numbers) for second, numbers in enumerate(found)]
    for at, numbers in thin(pulls):
        assert numbers.items() <= pulls[int(at)][1].items()


def test_a_value_that_stays_is_kept_now_and_then_and_at_the_end() -> None:
    pulls = [(float(second), {"a": 1.0}) for second in range(150)]
    assert [at for at, _ in thin(pulls)] == [0.0, 60.0, 120.0, 149.0]


def test_of_a_step_both_sides_are_kept() -> None:
    pulls = [(float(second), {"a": float(second >= 10)}) for second in range(20)]
    assert thin(pulls) == [(0.0, {"a": 0.0}), (9.0, {"a": 0.0}), (10.0, {"a": 1.0}), (19.0, {"a": 1.0})]


def test_a_curve_that_is_not_known_for_a_while_is_told_on_both_sides_of_that() -> None:
    pulls: Points = [(0.0, {"a": 1.0}), (1.0, {"a": 1.0}), (2.0, {}), (3.0, {"a": 1.0})]
    assert [at for at, _ in thin(pulls)] == [0.0, 1.0, 3.0]
