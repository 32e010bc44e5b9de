"""Event files that are rotated, read back with TensorBoard's own reader."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from tensorboard.compat.proto import event_pb2, summary_pb2

from dynamo_local.planner.tensorboard import EventFolder, remove_oldest

RUN = "2027-01-15_08-00-00"
MAX_BYTES = 16_000
DEADLINE_S = 30.0


def event(step: int) -> event_pb2.Event:
    value = summary_pb2.Summary.Value(tag="queue/waiting", simple_value=step)
    return event_pb2.Event(wall_time=1e9 + step, step=step, summary=summary_pb2.Summary(value=[value]))


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*"))


def steps_in(events: EventAccumulator) -> list[int]:
    events.Reload()
    return [scalar.step for scalar in events.Scalars("queue/waiting")]


def reader(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={SCALARS: 0})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[EventFolder]:
    folder = EventFolder(tmp_path, RUN, MAX_BYTES)
    yield folder
    folder.close()


def fill(folder: EventFolder) -> int:
    """Write two files, each with many events. Returns the step after the last one."""
    for step in range(MAX_BYTES // 8 // 20):
        folder.add(event(step))
    give_up_at = time.monotonic() + DEADLINE_S
    while len(files_of(folder.path)) < 2:
        assert time.monotonic() < give_up_at, "no new file is begun"
        time.sleep(0.05)  # files are named by the second
        step += 1
        folder.add(event(step))
    return step + 1


def test_a_run_in_several_files_reads_as_one(folder: EventFolder) -> None:
    count = fill(folder)
    folder.close()
    assert steps_in(reader(folder.path)) == list(range(count))


def test_a_reader_does_not_mind_that_the_oldest_file_is_removed(folder: EventFolder, tmp_path: Path) -> None:
    count = fill(folder)
    reading = reader(folder.path)
    assert steps_in(reading)[0] == 0
    _, newest = files_of(folder.path)
    remove_oldest(tmp_path, newest.stat().st_size)
    assert files_of(folder.path) == [newest]
    folder.add(event(count))
    folder.close()
    assert steps_in(reading) == list(range(count + 1))
    first = steps_in(reader(folder.path))[0]
    assert 0 < first < count
    assert steps_in(reader(folder.path)) == list(range(first, count + 1))


def test_all_runs_together_stay_below_the_bound_and_the_oldest_go_first(tmp_path: Path) -> None:
    old, older = tmp_path / "2027-01-14_08-00-00", tmp_path / "2027-01-15_07-59-59"
    for age_s, folder in ((100, old), (200, older)):
        folder.mkdir()
        file = folder / "events.out.tfevents.1800000000.host.1.0"
        file.write_bytes(bytes(MAX_BYTES // 2))
        os.utime(file, (time.time() - age_s,) * 2)
    EventFolder(tmp_path, RUN, MAX_BYTES).close()
    assert {path.name for path in tmp_path.iterdir()} == {old.name, RUN}


def test_what_is_not_a_planners_is_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / "training" / "events.out.tfevents.1", tmp_path / RUN / "notes.txt"]
    for file in others:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(2 * MAX_BYTES))
    EventFolder(tmp_path, RUN, MAX_BYTES).close()
    remove_oldest(tmp_path, 0)
    assert all(file.exists() for file in others)
    assert files_of(tmp_path / RUN) == []
