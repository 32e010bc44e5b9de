"""Two runs side by side, and the report of one; the file between."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.load import runs
from dynamo_local.load.figures import Record, figures, parse_objective
from dynamo_local.load.runs import Run, as_text, compare, report


def run(slowness: float, warmup_s: float = 0.0, **settings: Any) -> Run:
    """A hundred requests of two tokens; one more failed."""
    draw = random.Random(0)
    records = []
    for index in range(100):
        first_s = index + slowness * draw.uniform(0.1, 0.2)
        records.append(
            Record(float(index), 5, 2, float(index), [first_s, first_s + 0.1 * slowness], first_s + slowness, 2, 5)
        )
    records.append(Record(99.5, 5, 2, 99.5, [], 99.6, error="HTTP 429", detail="slow down"))
    found = figures(records, warmup_s, 100.0, parse_objective("ttft=250ms"))
    told = {"url": "http://h:1", "model": "m", "load": "1 request/s", "rate": "1", **settings}
    return Run(told, found, ["mind the gap"], warmup_s, False, 0.1, records)


def test_a_run_that_is_twice_as_slow() -> None:
    comparison = compare(run(1.0), run(2.0, rate="2"), random.Random(0))
    rows = {row.figure: row for row in comparison.rows}
    row = rows["time to first token, p50"]
    assert row.ratio == pytest.approx(2.0)
    assert row.interval is not None
    assert row.interval.low < 2.0 < row.interval.high
    assert rows["inter-token latency, p99"].ratio == pytest.approx(2.0)
    assert rows["gap between chunks, p50"].interval is None
    assert rows["goodput, share"].first == pytest.approx(100 / 101)
    assert rows["failed requests"].ratio == 1.0
    assert comparison.differing == {"rate": ("1", "2")}


def test_the_warm_up_is_left_out_here_too() -> None:
    whole, late = run(1.0), run(1.0, warmup_s=90.0)
    rows = {row.figure: row for row in compare(whole, late, random.Random(0)).rows}
    assert late.figures.e2e_s is not None
    assert rows["end to end, p50"].second == pytest.approx(late.figures.e2e_s.p50)
    assert rows["end to end, p50"].first != rows["end to end, p50"].second


def test_a_run_without_answers_can_be_compared() -> None:
    nothing = run(1.0)
    nothing = msgspec.structs.replace(nothing, requests=[], figures=figures([], 0.0, 10.0))
    text = as_text(compare(run(1.0), nothing, random.Random(0)))
    assert "time to first token, p50" in text
    assert as_text(compare(nothing, nothing, random.Random(0)))


def test_the_table_has_both_and_what_differs() -> None:
    lines = as_text(compare(run(1.0), run(2.0, model="other"), random.Random(0))).splitlines()
    row = next(line for line in lines if line.startswith("end to end, p50"))
    first, _, second, _, ratio = row.split()[4:9]
    assert float(second.replace(",", "")) == pytest.approx(2 * float(first.replace(",", "")), abs=2)
    assert ratio == "2.00"
    assert lines[-1] == "differing: model: 'm' | 'other'"


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    one = run(1.0)
    (tmp_path / "a.json").write_bytes(runs.encode(one))
    again = runs.read(tmp_path / "a.json")
    assert again.figures.errors == one.figures.errors
    assert again.requests[3].chunks_s == pytest.approx(one.requests[3].chunks_s, abs=1e-6)
    assert runs.encode(again) == runs.encode(one)


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot read"), ("{}", "not a file of"), ("[", "not a file of"), ("2", "has format 2")],
)
def test_files_that_are_no_runs(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "a.json"
    if content == "2":
        path.write_bytes(runs.encode(msgspec.structs.replace(run(1.0), format=2)))
    elif content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=says):
        runs.read(path)


def test_the_report_has_what_there_is_and_no_more() -> None:
    text = report(run(1.0))
    assert "1 request/s at http://h:1, model m" in text
    assert "101: 100 completed, 1 failed" in text
    assert "failed    1 HTTP 429: slow down" in text
    assert "ttft <= 250ms: 99.0% of the requests" in text
    assert "note: mind the gap" in text
    empty = msgspec.structs.replace(run(1.0), requests=[], figures=figures([], 0.0, 0.0), notes=[], interrupted=True)
    assert "No request was sent." in report(empty)
    assert "Interrupted after 0.0 s." in report(empty)
