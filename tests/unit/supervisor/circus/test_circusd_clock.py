"""circusd's clock, where the machine's is set."""

from __future__ import annotations

import time

import pytest

from dynamo_local.supervisor.circus.circusd import steady_clock


def test_it_shows_the_time_of_day() -> None:
    assert steady_clock()() == pytest.approx(time.time(), abs=1.0)


def test_it_goes_on_when_the_wall_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: before - 3600.0)
    assert 0.0 <= clock() - before < 60.0
