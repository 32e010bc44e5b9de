"""The file of events: what is written is read, also across rotation, damage, and the next server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from dynamo_local.core.messages.reports import Event
from dynamo_local.supervisor.server.reports.event_log import MAX_PENDING, EventLog, EventReader
from tests.unit.supervisor.recording import RecordingReport

DEATH = Event("death", "ended: killed by SIGKILL", "restart in 1 s", "ns_W", exit_code=-9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def log_of(path: Path, report: RecordingReport | None = None, max_bytes: int = 1 << 20) -> EventLog:
    return EventLog(path, report or RecordingReport(), max_bytes=max_bytes, wall_clock=lambda: 5.0)


def whats(events: list[Event]) -> list[str]:
    return [event.what for event in events]


def test_an_event_is_read_as_it_was_written_with_the_time_at_which_it_was(path: Path) -> None:
    log_of(path).add(DEATH)
    log_of(path).add(replace(DEATH, time=7.5))
    assert EventReader(path).all() == [replace(DEATH, time=5.0), replace(DEATH, time=7.5)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_file_there_are_no_events(path: Path) -> None:
    assert EventReader(path).all() == []


def test_a_damaged_line_costs_no_other(path: Path) -> None:
    log_of(path).add(replace(DEATH, what="first"))
    with path.open("ab") as file:
        file.write(b'{"kind": "death"}\nnot json\n\xff\xfe\n{"kind": "start", "what": "cut o')
    log_of(path).add(replace(DEATH, what="last"))
    assert whats(EventReader(path).all()) == ["first", "last"]


def test_a_full_file_is_kept_once_and_none_grows_beyond_its_bound(path: Path) -> None:
    log = log_of(path, max_bytes=600)
    for number in range(30):
        log.add(replace(DEATH, what=f"event {number}"))
    found = whats(EventReader(path).all())
    assert found == [f"event {number}" for number in range(30 - len(found), 30)]
    assert 4 < len(found) < 12
    assert sorted(file.name for file in path.parent.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert all(file.stat().st_size <= 600 for file in path.parent.iterdir())


def test_who_follows_misses_nothing_when_the_file_is_renamed_or_removed(path: Path) -> None:
    log, reader = log_of(path, max_bytes=600), EventReader(path)
    log.add(replace(DEATH, what="before"))
    assert whats(reader.all()) == ["before"]
    followed = []
    for number in range(30):
        log.add(replace(DEATH, what=str(number)))
        if number % 3 == 0:
            followed += whats(reader.new())
    followed += whats(reader.new())
    assert followed == list(map(str, range(30)))
    path.unlink()
    assert reader.new() == []
    log.add(replace(DEATH, what="after"))
    assert whats(reader.new()) == ["after"]
    assert reader.new() == []


def test_who_follows_reads_a_line_only_once_it_is_whole(path: Path) -> None:
    reader = EventReader(path)
    assert reader.all() == []
    path.write_bytes(b'{"kind": "start", ')
    assert reader.new() == []
    with path.open("ab") as file:
        file.write(b'"what": "started"}\n')
    assert whats(reader.new()) == ["started"]


def test_what_a_full_disk_did_not_take_is_reported_once_and_written_later(tmp_path: Path) -> None:
    report, path = RecordingReport(), tmp_path / "absent" / "events.jsonl"
    log = log_of(path, report)
    log.add(replace(DEATH, what="first"))
    log.add(replace(DEATH, what="second"))
    assert report.lines == [f"events cannot be written to {path}, and are kept: No such file or directory"]
    path.parent.mkdir()
    log.flush()
    assert whats(EventReader(path).all()) == ["first", "second"]
    log.add(replace(DEATH, what="third"))
    assert whats(EventReader(path).all()) == ["first", "second", "third"]
    assert len(report.lines) == 1


def test_a_line_of_which_a_full_disk_took_a_part_is_written_whole_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = log_of(path), os.write
    log.add(replace(DEATH, what="first"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        log.add(replace(DEATH, what="second"))
    assert whats(EventReader(path).all()) == ["first"]
    log.add(replace(DEATH, what="third"))
    assert path.read_bytes().count(b"\n") == 3
    assert whats(EventReader(path).all()) == ["first", "second", "third"]


def test_the_number_of_events_that_are_kept_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "events.jsonl"
    log = log_of(path)
    for number in range(MAX_PENDING + 5):
        log.add(replace(DEATH, what=str(number)))
    path.parent.mkdir()
    log.flush()
    assert whats(EventReader(path).all())[0] == "5"
