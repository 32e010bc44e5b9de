"""Every record that was written counts once, whoever is killed when: those who write, and the one who folds."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.errors import StateError
from dynamo_local.core.usage.records import UsageRecord
from dynamo_local.core.usage.totals import DAY_S, SCHEMA_VERSION, NewerTotalsError, report
from state.files import Disk
from state.paths import StatePaths
from state.usage.journal import UsageJournal
from state.usage.totals import UsageStore, has_usage, read_usage

NOW = 100 * DAY_S


class Killed(BaseException):
    """The process was killed here."""


class KilledDisk(Disk):
    """Is killed when it comes to step number `last`."""

    def __init__(self, last: int) -> None:
        self.left = last

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def create(self, path: Path) -> int:
        self.step()
        return super().create(path)

    def write(self, descriptor: int, data: bytes) -> int:
        self.step()
        return super().write(descriptor, data)

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        super().rename(source, target)

    def sync_directory(self, directory: Path) -> None:
        self.step()


class House:
    """Journals of some frontends, and their server."""

    def __init__(self, root: Path) -> None:
        self.paths = StatePaths(root, "n")
        self.journals: dict[int, UsageJournal] = {}
        self.leases = 0
        self.written = 0

    def write(self, frontend: int, tokens: int) -> None:
        if frontend not in self.journals:
            self.leases += 1
            lease = f"lease{self.leases}"
            self.journals[frontend] = UsageJournal(self.paths, lease, print, max_bytes=300)
        self.journals[frontend].write(UsageRecord(NOW - tokens, "chat", "team", prompt=tokens))
        self.written += tokens

    def kill(self, frontend: int, torn: bytes) -> None:
        journal = self.journals.pop(frontend, None)
        if journal is not None and journal._descriptor is not None:
            # Killed within a write.
            os.write(journal._descriptor, torn)
            os.close(journal._descriptor)

    def fold(self, killed_at: int) -> None:
        with suppress(Killed):
            UsageStore(self.paths, disk=KilledDisk(killed_at)).fold(NOW)

    def counted(self) -> int:
        return report(read_usage(self.paths)).total.prompt


FRONTENDS = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(st.just("write"), FRONTENDS, st.integers(1, 1000)),
    st.tuples(st.just("kill"), FRONTENDS, st.sampled_from([b"", b'{"time', b'{"time":1.0,"prompt":7}'])),
    st.tuples(st.just("fold"), st.integers(0, 6)),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_each_record_counts_once_whoever_is_killed(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        for what, *arguments in steps:
            getattr(house, what)(*arguments)
            assert house.counted() == house.written
        for frontend in list(house.journals):
            house.kill(frontend, b"")
        for _ in range(2):
            house.fold(99)
        left = list(house.paths.usage_dir.iterdir()) if house.paths.usage_dir.exists() else []
        assert [path.name for path in left] == (["totals.json"] if house.written else [])
        assert house.counted() == house.written
        assert read_usage(house.paths).folded == {}


def test_damaged_lines_are_counted_and_told(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.write(0, 5)
    (journal,) = house.paths.usage_dir.iterdir()
    journal.write_bytes(b"\xff damaged\n" + journal.read_bytes() + b"{}\n[]\n")
    assert (report(read_usage(house.paths)).damaged, house.counted()) == (3, 5)
    store = UsageStore(house.paths)
    assert (store.fold(NOW).damaged, store.fold(NOW).damaged) == (3, 0)
    assert (report(read_usage(house.paths)).damaged, house.counted()) == (3, 5)


def test_totals_that_are_damaged_are_kept_aside_and_newer_ones_are_left_alone(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.write(0, 5)
    totals = house.paths.usage_totals
    totals.write_bytes(b"damaged")
    with pytest.raises(StateError, match="damaged"):
        read_usage(house.paths)
    (note,) = UsageStore(house.paths).fold(NOW).notes
    assert "counted anew" in note
    assert totals.with_name("totals.json.damaged").read_bytes() == b"damaged"
    assert house.counted() == 5

    newer = totals.read_bytes().replace(b'"schema_version":%d' % SCHEMA_VERSION, b'"schema_version":99')
    totals.write_bytes(newer)
    house.write(0, 6)
    for touch in (lambda: read_usage(house.paths), lambda: UsageStore(house.paths).fold(NOW)):
        with pytest.raises(NewerTotalsError, match="version 99"):
            touch()
    assert totals.read_bytes() == newer


def test_files_are_private_and_there_are_none_without_requests(tmp_path: Path) -> None:
    house = House(tmp_path)
    assert not has_usage(house.paths)
    assert UsageStore(house.paths).fold(NOW).damaged == 0
    assert list(tmp_path.iterdir()) == []
    house.write(0, 5)
    house.fold(99)
    assert has_usage(house.paths)
    modes = {path.name.partition(".")[0]: path.stat().st_mode & 0o777 for path in house.paths.usage_dir.iterdir()}
    assert modes == {"journal": 0o600, "totals": 0o600}
    assert house.paths.usage_dir.stat().st_mode & 0o777 == 0o700


class Full:
    """A disk that takes a part of a record, and then nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 0
        self._write = os.write
        monkeypatch.setattr("state.usage.journal.os.write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room < len(data):
            if self.room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[: self.room]
        self.room -= len(data)
        return self._write(descriptor, data)


def test_what_a_full_disk_does_not_take_is_kept_told_once_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    paths = StatePaths(tmp_path, "n")
    journal = UsageJournal(paths, "lease", told.append, max_pending=2)
    disk = Full(monkeypatch)
    disk.room = 100
    for tokens in (1, 2, 4, 8, 16):
        journal.write(UsageRecord(NOW, "chat", "team", prompt=tokens))
    assert (journal.pending, journal.lost) == (2, 2)
    (why,) = told
    assert os.strerror(errno.ENOSPC) in why
    assert (report(read_usage(paths)).total.prompt, report(read_usage(paths)).damaged) == (1, 0)

    disk.room = 10_000
    journal.flush()
    found = report(read_usage(paths))
    assert (found.total.prompt, found.total.requests, found.lost) == (1 + 8 + 16, 3, 2)
    disk.room = 0
    journal.write(UsageRecord(NOW, "chat"))
    assert len(told) == 2
    journal.close()
    assert journal.lost == 3


def test_a_journal_whose_file_is_removed_goes_on_in_another(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.write(0, 5)
    for path in house.paths.usage_dir.iterdir():
        path.unlink()
    house.paths.usage_dir.rmdir()
    house.write(0, 6)
    assert house.counted() == 6
