"""Chaos until there were so many faults: what is summed up, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import soak

GOOD: dict[str, Any] = {
    "seed": 1,
    "seconds": 60.0,
    "fault_count": 40,
    "faults": {"worker killed": 30, "NATS killed": 10},
    "requests": 100,
    "outcomes": {"right tokens, once": 100},
    "longest_gap_s": {"worker killed": 2.5},
    "defects": [],
    "logs": "/nowhere",
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Seeds of the runs that were begun, and how many faults were asked for."""
    seen: list[tuple[int, int]] = []

    def run(options: object, preset: object, seed: int, most_faults: int, more: object) -> soak.Run:
        seen.append((seed, most_faults))
        return {**GOOD, "seed": seed, "fault_count": min(40, most_faults)}

    monkeypatch.setattr(soak, "_run", run)
    return seen


def test_runs_until_there_were_enough(asked: list[tuple[int, int]], tmp_path: Path) -> None:
    assert soak.main(["--faults=100", f"--json={tmp_path / 'soak.json'}"]) == 0
    assert asked == [(1, 100), (2, 60), (3, 20)]


def test_goes_on_where_it_was(asked: list[tuple[int, int]], tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    file.write_text(json.dumps([GOOD, {**GOOD, "seed": 2}]))
    assert soak.main(["--faults=100", f"--json={file}"]) == 0
    assert asked == [(3, 20)]
    assert len(json.loads(file.read_text())) == 3


def test_a_run_that_was_not_good_makes_all_of_it_bad(asked: list[tuple[int, int]], tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    file.write_text(json.dumps([{**GOOD, "fault_count": 100, "defects": ["3 requests failed"]}]))
    assert soak.main(["--faults=100", f"--json={file}"]) == 1
    assert asked == []


def test_time_may_be_up_first(asked: list[tuple[int, int]], tmp_path: Path) -> None:
    assert soak.main(["--faults=100", "--minutes=0.0000001", f"--json={tmp_path / 'soak.json'}"]) == 2


def test_the_summary_adds_up_and_names_what_was_wrong() -> None:
    broken = {"seed": 3, "defects": ["the run broke: ValueError"]}
    told = soak.summary([GOOD, {**GOOD, "seed": 2, "longest_gap_s": {"worker killed": 4.0}}, broken])
    assert "worker killed" in told
    assert "4.0 s" in told
    assert "seed 3: the run broke" in told
    assert "80 faults in 3 runs and 2 minutes, 200 requests: NOT GOOD (1 runs)" in told
