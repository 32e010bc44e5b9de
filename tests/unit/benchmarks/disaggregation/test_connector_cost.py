"""What turns of two engines say about the cost of the connector."""

from __future__ import annotations

import pytest

from benchmarks.disaggregation.connector_cost import Round, Turn, report
from benchmarks.harness.accounting import CLIENT, Usage


def turn(*steps_s: float, cpu_s: float) -> Turn:
    return Turn(steps_s, Usage({"Worker": cpu_s, CLIENT: 100.0}, busy_s=1.0, stolen_s=0.0, at=1.0))


def test_the_client_is_no_part_of_an_engine() -> None:
    assert turn(0.1, 0.1, 0.4, cpu_s=0.6).cpu_s == pytest.approx(0.2)


def test_a_slow_step_shows_in_the_mean_alone() -> None:
    found = turn(0.1, 0.1, 0.4, cpu_s=0.6)
    assert found.step_s == 0.1
    assert found.mean_s == pytest.approx(0.2)


def test_the_engine_with_the_connector_is_the_numerator(capsys: pytest.CaptureFixture[str]) -> None:
    one = Round(off=turn(0.1, cpu_s=0.1), control=turn(0.1, 0.1, 0.13, cpu_s=0.3), on=turn(0.11, cpu_s=0.2))
    ratios = report({8: [one, one]})["8"]["ratios"]
    assert ratios["step"]["on"]["estimate"] == pytest.approx(1.1)
    assert ratios["step"]["control"]["estimate"] == pytest.approx(1.0)
    assert ratios["mean"]["control"]["estimate"] == pytest.approx(1.1)
    assert ratios["cpu"]["on"]["estimate"] == pytest.approx(2.0)
    assert "1.100" in capsys.readouterr().out
