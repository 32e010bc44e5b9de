"""A short run of the chaos harness. `make chaos` is the long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.frontend import PULLED
from tests.chaos.run import run_on_mockers
from tests.chaos.settings import ON_DISAGG, ChaosSettings

pytestmark = pytest.mark.integration

COMMON: dict[str, Any] = {
    "step_ms": 15.0,
    "stall_s": 180.0,
    "settle_s": 180.0,
    "gap_slack_s": 60.0,
}
"""The longest answers, which are awaited at the end, have 600 steps. On a busy machine, what is only slow has not been
forgotten."""


def test_every_request_is_accounted_for_and_nothing_is_left_over(tmp_path: Path) -> None:
    settings = ChaosSettings(
        seconds=10, seed=7, workers=4, streams=16, migrations_per_s=20, least_migrations=10, **COMMON
    )
    report = run_on_mockers(settings, tmp_path / "state")
    assert report.defects == [], report.as_text()
    # Otherwise nothing was tried.
    assert report.fault_count >= 5, report.as_text()
    assert report.results.right >= 20, report.as_text()
    assert report.orders["migrated"] >= settings.least_migrations, report.as_text()


def test_with_prefill_workers_as_well(tmp_path: Path) -> None:
    changes = {"seconds": 12, "seed": 5, "workers": 3, "prefill_workers": 3, "streams": 24}
    report = run_on_mockers(ChaosSettings(**{**ON_DISAGG, **COMMON, **changes}), tmp_path / "state")
    assert report.defects == [], report.as_text()
    assert report.fault_count >= 5, report.as_text()
    assert report.results.right >= 20, report.as_text()
    assert report.results.prefills.get(PULLED, 0) >= 10, report.as_text()
