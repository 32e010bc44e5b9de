"""Which lines of a log are shown, and repeated ones as one."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from dynamo_local.cli.main import run
from dynamo_local.cli.output.log_lines import LEVELS, Repeats, Selection, level_of, time_of
from state.paths import StatePaths

OURS = "2026-05-04 12:30:05,447 WARNING dynamo_local.bus.nats: NATS connection lost; reconnecting"
NATS = "[20078] 2026/05/04 12:30:05.191832 [INF] Server is ready"
CIRCUS = "2026-05-04 12:30:05 circus[99] [ERROR] no"
ENGINE = "(EngineCore pid=99) INFO 05-04 12:30:05 [core.py:1] ready"
LAST = "error: no memory left on the device"
AT = datetime(2026, 5, 4, 12, 30, 5).astimezone().timestamp()


@pytest.mark.parametrize(
    ("line", "level"),
    [(OURS, "warning"), (NATS, "info"), (CIRCUS, "error"), (ENGINE, "info"), (LAST, "error"), ("  File x", None)],
)
def test_each_format_has_its_level(line: str, level: str | None) -> None:
    found = level_of(line)
    assert (None if found is None else LEVELS[found]) == level


@pytest.mark.parametrize(
    ("line", "at"), [(OURS, AT), (NATS, AT), (CIRCUS, AT), (LAST, None), ("2026-99-04 12:30:05 x", None)]
)
def test_each_dated_format_has_its_time(line: str, at: float | None) -> None:
    assert time_of(line) == at


def test_lines_of_a_traceback_go_with_their_error() -> None:
    lines = ["2026-05-04 12:30:04,1 INFO a: x", "more", "2026-05-04 12:30:05,1 ERROR a: y", "Traceback", "  File"]
    assert Selection(level="error").of(lines) == lines[2:]
    assert Selection(cutoff=AT).of(lines) == lines[2:]
    assert Selection(level="info").of(["without a level", *lines]) == lines
    assert Selection().of(["without a level", *lines]) == ["without a level", *lines]


def test_a_selection_goes_on_where_it_was() -> None:
    selection = Selection(level="error")
    assert selection.of([CIRCUS]) == [CIRCUS]
    assert selection.of(["Traceback"]) == ["Traceback"]
    assert selection.of([NATS, "more"]) == []


def test_repeated_lines_are_one_with_their_number() -> None:
    repeats, later = Repeats(), OURS.replace(":05,447", ":06,448")
    assert repeats.of([OURS, later]) == [OURS]
    assert repeats.of([later, NATS]) == ["(the last line 2 more times)", NATS]
    assert repeats.of([NATS.replace(".19", ".20"), "", ""]) == ["(the last line 1 more time)", "", ""]
    assert repeats.end() == []


def test_logs_have_short_names_and_no_colours_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    paths = StatePaths(tmp_path, "ns")
    paths.logs_dir.mkdir()
    quiet = OURS.replace("WARNING", "INFO")
    paths.log_file("ns_Router").write_text(f"{quiet}\n{OURS}\n{quiet}\n")
    assert run(["logs", "--namespace=ns", "--level=warning"]) == 0
    assert capsys.readouterr().out == f"Router | {OURS}\n"
    assert run(["logs", "Router", "--namespace=ns", "-n", "2"]) == 0
    assert capsys.readouterr().out == f"{OURS}\n{quiet}\n"
    assert run(["logs", "--namespace=ns", "--since", "1h"]) == 0
    assert capsys.readouterr().out == ""
    assert run(["logs", "--namespace=ns", "--since", "soon"]) == 2
