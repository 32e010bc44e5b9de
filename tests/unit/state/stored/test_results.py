"""Results of a batch: on the disk as a whole before they count, and nothing else is cut off."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from dynamo_local.core.errors import StateError
from dynamo_local.core.stored.lines import answered_line
from state.files import Disk, DiskError
from state.stored.results import ResultFile, Results


def line(custom_id: str) -> bytes:
    return answered_line("r", custom_id, 200, b"{}")


def test_what_a_crash_cut_off_is_no_result(tmp_path: Path) -> None:
    whole = line("a") + line("b")
    for cut in range(len(line("a")) + 1, len(whole)):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(whole[:cut])
        file = ResultFile(path)
        assert [each.custom_id for each in file.open()] == ["a"]
        file.append([line("c")])
        file.close()
        assert path.read_bytes() == line("a") + line("c")


def test_a_result_has_whatever_ends_of_lines_json_allows_in_texts(tmp_path: Path) -> None:
    path, body = tmp_path / "out.jsonl", '{"text":"a\u0085b\u2028c"}'.encode()
    for _ in range(2):
        file = ResultFile(path)
        file.open()
        file.append([answered_line("r", "a", 200, body)])
        file.close()
    # An earlier release wrote them as they are.
    path.write_bytes(path.read_bytes() + line("b").replace(b"{}", body))
    assert [each.custom_id for each in ResultFile(path).open()] == ["a", "a", "b"]
    texts = [json.loads(each)["response"]["body"]["text"] for each in path.read_bytes().splitlines()]
    assert texts == ["a\u0085b\u2028c"] * 3
    assert len(path.read_bytes().decode().splitlines()) == 2 + 3


@pytest.mark.parametrize("content", [b"a letter\n", b"a letter", b"{}\n", line("a") + b"\n" + line("b")])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "letter"
    path.write_bytes(content)
    with pytest.raises(StateError, match="something else"):
        ResultFile(path).open()
    assert path.read_bytes() == content


class FullDisk(Disk):
    room = 60

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(descriptor, data[: self.room])
        self.room -= written
        return written


def test_a_full_disk_takes_no_part_of_a_result(tmp_path: Path) -> None:
    disk = FullDisk()
    results = Results(tmp_path, disk)
    results.open()
    with pytest.raises(DiskError, match="No space left"):
        results.add([("a", line("a"))], [("b", line("b"))])
    assert (results.done, results.completed, results.failed) == (set(), 0, 0)
    assert results.output.read_bytes() == b""
    disk.room = len(line("a"))
    # One of the two files has room.
    with pytest.raises(DiskError):
        results.add([("a", line("a"))], [("b", line("b"))])
    assert (results.done, results.completed, results.failed) == ({"a"}, 1, 0)
    disk.room = 1000
    results.add([], [("b", line("b"))])
    results.close()
    again = Results(tmp_path)
    again.open()
    assert (again.done, again.completed, again.failed) == ({"a", "b"}, 1, 1)
