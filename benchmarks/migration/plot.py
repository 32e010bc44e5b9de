"""Draws the gaps of moved streams: `python -m benchmarks.migration.plot FIGURES.json docs/images/moves.svg`.

FIGURES.json is what `python -m benchmarks migration --json` has written. Both axes are logarithmic; a bar is the 95 %
confidence interval of the median (bootstrap).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.harness.spread import Interval, bootstrap, median

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 20, 50
_ARMS = (
    ("warm", "move", "#1b7837"),
    ("cold", "replay", "#b2182b"),
)
_STEPS = 2
"""The aim: a line of so many decode steps."""
_GREY, _LINES = "#555", "#ddd"


@dataclass(frozen=True)
class Curve:
    """Gaps in ms by tokens."""

    name: str
    colour: str
    points: Sequence[tuple[int, Interval]]
    dashed: bool = False


def curves_of(moves: Sequence[dict[str, object]]) -> list[Curve]:
    """Both ways to move, and the aim, of the benchmark's figures."""
    rows = sorted(moves, key=lambda row: _number(row["tokens"]))
    found = [
        Curve(name, colour, [(_tokens(row), bootstrap(_values(row, arm, "gap_s"))) for row in rows])
        for arm, name, colour in _ARMS
    ]
    both = ("step_s", "there_s")
    steps = [(_tokens(row), _STEPS * sum(median(_values(row, "warm", key)) for key in both) / 2) for row in rows]
    aim = [(tokens, Interval(value, value, value)) for tokens, value in steps]
    return [*found, Curve(f"{_STEPS} decode steps", _GREY, aim, dashed=True)]


def draw(curves: Sequence[Curve]) -> str:
    """The plot, as SVG."""
    tokens = [point[0] for curve in curves for point in curve.points]
    gaps = [value for curve in curves for _, each in curve.points for value in (each.low, each.high)]
    x = _scale(min(tokens), max(tokens), _LEFT, _WIDTH - _RIGHT)
    y = _scale(10 ** math.floor(math.log10(min(gaps))), 10 ** math.ceil(math.log10(max(gaps))), _HEIGHT - _BOTTOM, _TOP)
    svg = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {_WIDTH} {_HEIGHT}",
            "font-family": "sans-serif",
            "font-size": "13",
        },
    )
    _add(svg, "rect", width=_WIDTH, height=_HEIGHT, fill="white")
    _axes(svg, x, y, sorted(set(tokens)), min(gaps), max(gaps))
    for curve in curves:
        _curve(svg, curve, x, y)
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


_Scale = Callable[[float], float]


def _scale(low: float, high: float, begin: float, end: float) -> _Scale:
    return lambda value: begin + (end - begin) * math.log(value / low) / math.log(high / low)


def _axes(svg: ElementTree.Element, x: _Scale, y: _Scale, tokens: Sequence[int], low: float, high: float) -> None:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        at = y(10.0**power)
        _add(svg, "line", x1=_LEFT, x2=right, y1=at, y2=at, stroke=_LINES)
        _text(svg, _LEFT - 8, at + 4, f"{1000 * 10.0**power:,.0f}", anchor="end")
    for number in tokens:
        _add(svg, "line", x1=x(number), x2=x(number), y1=_TOP, y2=bottom, stroke=_LINES)
        _text(svg, x(number), bottom + 18, f"{number:,}", anchor="middle")
    _text(svg, (_LEFT + right) / 2, _HEIGHT - 10, "tokens of the stream", anchor="middle")
    middle = (_TOP + bottom) / 2
    _text(svg, 16, middle, "gap, ms", anchor="middle", transform=f"rotate(-90 16 {middle:g})")


def _curve(svg: ElementTree.Element, curve: Curve, x: _Scale, y: _Scale) -> None:
    points = [(x(tokens), each) for tokens, each in curve.points]
    path = " ".join(f"{at:.1f},{y(each.estimate):.1f}" for at, each in points)
    style = {"stroke-dasharray": "6 4"} if curve.dashed else {}
    _add(svg, "polyline", points=path, fill="none", stroke=curve.colour, **{"stroke-width": 2, **style})
    for at, each in () if curve.dashed else points:
        _add(svg, "line", x1=at, x2=at, y1=y(each.low), y2=y(each.high), stroke=curve.colour)
        _add(svg, "circle", cx=at, cy=y(each.estimate), r=3.5, fill=curve.colour)
    at, last = points[-1]
    _text(svg, at + 10, y(last.estimate) + 4, curve.name, fill=curve.colour)


def _text(
    svg: ElementTree.Element, x: float, y: float, text: str, anchor: str = "start", fill: str = _GREY, **more: str
) -> None:
    _add(svg, "text", x=x, y=y, fill=fill, **{"text-anchor": anchor, **more}).text = text


def _add(svg: ElementTree.Element, kind: str, **attributes: object) -> ElementTree.Element:
    shown = {name: f"{value:.1f}" if isinstance(value, float) else str(value) for name, value in attributes.items()}
    return ElementTree.SubElement(svg, kind, shown)


def _tokens(row: dict[str, object]) -> int:
    return int(_number(row["tokens"]))


def _values(row: dict[str, object], arm: str, name: str) -> list[float]:
    moves = row[arm]
    assert isinstance(moves, list)
    return [_number(move[name]) for move in moves]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description="draws the gaps that `python -m benchmarks migration --json` measured")
    parser.add_argument("figures", type=Path)
    parser.add_argument("image", type=Path)
    arguments = parser.parse_args()
    figures = json.loads(arguments.figures.read_text())
    arguments.image.write_text(draw(curves_of(figures["moves"])))


if __name__ == "__main__":
    main()
