"""The plot of a migration benchmark."""

from __future__ import annotations

import random
from xml.etree import ElementTree

import pytest

from benchmarks.migration.plot import curves_of, draw


def row(tokens: int) -> dict[str, object]:
    draw_from = random.Random(tokens)

    def moves(gap_s: float) -> list[dict[str, float]]:
        return [{"gap_s": gap_s * draw_from.uniform(0.8, 1.2), "step_s": 0.008, "there_s": 0.012} for _ in range(5)]

    return {"tokens": tokens, "warm": moves(0.02), "cold": moves(tokens / 4000)}


def test_every_way_and_the_aim_have_a_curve_with_all_lengths() -> None:
    curves = curves_of([row(8000), row(256), row(1024)])
    assert [curve.name for curve in curves] == ["move", "replay", "2 decode steps"]
    assert all([tokens for tokens, _ in curve.points] == [256, 1024, 8000] for curve in curves)
    assert curves[-1].points[0][1].estimate == pytest.approx(0.02)


def test_all_of_it_is_on_the_sheet_and_longer_gaps_are_higher() -> None:
    svg = ElementTree.fromstring(draw(curves_of([row(256), row(8000)])))
    lines = svg.findall("{*}polyline")
    assert len(lines) == 3
    points = [[tuple(map(float, point.split(","))) for point in line.attrib["points"].split()] for line in lines]
    assert all(0 < x < 720 and 0 < y < 420 for line in points for x, y in line)
    move, replay, _ = points
    assert replay[-1][1] < move[-1][1]
    names = [text.text for text in svg.findall("{*}text")]
    assert {"move", "replay", "256", "8,000", "gap, ms"} <= set(names)
