"""Events and lines of logs as text: which are shown, repeated ones as one, and what `dynamo events` says where there
are none."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from dynamo_local.cli.main import run
from dynamo_local.cli.options import cutoff_of
from dynamo_local.cli.reports import LEVELS, Repeats, Selection, chosen, level_of, line_of, time_of
from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.reports import Event
from dynamo_local.supervisor.server.reports.event_log import EventLog
from state.paths import StatePaths
from tests.unit.supervisor.recording import RecordingReport

NOON = datetime(2026, 5, 4, 12, 30, 5).astimezone()
DEATH = Event("death", "ended: killed by SIGKILL", "restart in 1 s", "ns_VllmWorker_1", NOON.timestamp())


def test_a_line_has_local_time_the_short_name_what_and_why() -> None:
    assert line_of(DEATH, NOON) == "12:30:05  VllmWorker_1      ended: killed by SIGKILL (restart in 1 s)"


def test_another_day_has_its_date_and_the_server_no_name() -> None:
    event = Event("server", "stopped", time=NOON.timestamp())
    assert line_of(event, datetime(2026, 5, 5).astimezone()) == "2026-05-04 12:30:05  -                 stopped"


def test_an_event_of_an_endpoint_has_its_name_in_the_place_of_a_watchers() -> None:
    event = Event("endpoint", "ready", time=NOON.timestamp(), endpoint="chat")
    assert line_of(event, NOON) == "12:30:05  chat              ready"
    worker = Event("death", "ended", watcher="ns_chat@2_VllmWorker_1", time=NOON.timestamp())
    assert line_of(worker, NOON) == "12:30:05  chat@2_VllmWorker_1  ended"


def test_a_migration_names_its_request_and_no_event_is_more_than_a_line() -> None:
    event = Event("migration", "migrated to ns_B", "a\nb", "ns_A", NOON.timestamp(), request="cmpl-1")
    assert line_of(event, NOON).endswith("cmpl-1 migrated to ns_B (a b)")


def test_events_are_chosen_by_kind_and_age() -> None:
    old, new = Event("start", "started", time=10.0), Event("death", "ended", time=20.0)
    assert chosen([old, new], (), None) == [old, new]
    assert chosen([old, new], ("start",), None) == [old]
    assert chosen([old, new], ("start", "death"), 15.0) == [new]


def test_an_age_is_a_time_before_now() -> None:
    assert cutoff_of("10m", lambda: 1000.0) == 400.0
    assert cutoff_of(None) is None
    with pytest.raises(UsageError, match="not a duration"):
        cutoff_of("10 parsecs")


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StatePaths:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    paths = StatePaths(tmp_path, "ns")
    paths.logs_dir.mkdir(parents=True)
    return paths


def test_events_of_a_server_that_has_ended_are_shown(paths: StatePaths, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    log = EventLog(paths.events_file, RecordingReport())
    for number in range(3):
        log.add(Event("start", f"started {number}", time=now - 100 * number))
    assert run(["events", "--namespace=ns", "-n", "2"]) == 0
    assert [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()] == ["started 1", "started 2"]
    assert run(["events", "--namespace=ns", "--since", "150s", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith('{"kind":"start","what":"started ') for line in lines] == [True, True]


def test_without_events_and_server_it_says_so(paths: StatePaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["events", "--namespace=ns"]) == 2
    assert capsys.readouterr().err.startswith("error: there are no events in namespace ns")
    assert run(["events", "--namespace=ns", "--since=soon"]) == 2
    assert run(["events", "--namespace=ns", "--kind=birth"]) == 2


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
