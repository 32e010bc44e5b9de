from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import NotRunningError
from dynamo_local.supervisor.server.reports.logs import Follower, last_error, rotate_large, select, start_afresh, tail


@given(st.lists(st.text(st.characters(blacklist_characters="\n", codec="utf-8"))), st.integers(0, 20))
def test_tail_gives_the_last_lines_whatever_is_in_them(lines: list[str], count: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
        file.flush()
        assert tail(Path(file.name), count) == (lines[-count:] if count else [])


def test_tail_reads_backwards_through_many_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    lines = [f"{number:0100d}" for number in range(3000)]
    path.write_text("\n".join(lines) + "\n")
    assert tail(path, 2000) == lines[-2000:]


def test_tail_begins_where_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\ntwo\n")
    assert tail(path, 10, after=4) == ["two"]
    assert tail(path, 10, before=4) == ["one"]
    assert tail(path, 10, after=100) == ["one", "two"]
    assert tail(tmp_path / "none.log", 10) == []


def test_a_follower_gives_each_line_once_and_none_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\ntwo\nthr")
    follower = Follower(path)
    assert follower.last_lines(1) == ["two"]
    assert follower.new_lines() == []
    with path.open("a") as file:
        file.write("ee\nfour\n")
    assert follower.new_lines() == ["three", "four"]
    assert follower.new_lines() == []


def test_a_follower_goes_on_after_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "ns_A.log"
    path.write_text("long line before\n")
    follower = Follower(path)
    follower.last_lines(0)
    rotate_large(tmp_path, max_bytes=1)
    with path.open("a") as file:
        file.write("after\n")
    assert follower.new_lines() == ["after"]


def test_rotation_keeps_a_few_and_an_open_log_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "ns_A.log"
    with path.open("a") as writer:
        for number in range(6):
            writer.write(f"{number}\n")
            writer.flush()
            rotate_large(tmp_path, max_bytes=1)
    assert path.read_text() == ""
    assert [(tmp_path / f"ns_A.log.{i}").read_text() for i in (1, 2, 3)] == ["5\n", "4\n", "3\n"]
    assert not (tmp_path / "ns_A.log.4").exists()


def test_a_small_log_is_not_rotated(tmp_path: Path) -> None:
    (tmp_path / "ns_A.log").write_text("12345")
    rotate_large(tmp_path, max_bytes=5)
    assert [path.name for path in tmp_path.iterdir()] == ["ns_A.log"]


def test_a_new_run_sets_the_logs_of_the_last_one_aside(tmp_path: Path) -> None:
    (tmp_path / "ns_A.log").write_text("old\n")
    (tmp_path / "ns_B.log").touch()
    start_afresh(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ns_A.log.1", "ns_B.log"]


def test_the_error_line_is_told_before_any_other() -> None:
    assert last_error(["error: first", "error: no such model", "Exception ignored in"]) == "no such model"
    assert last_error(["Segmentation fault", ""]) == "Segmentation fault"
    assert last_error([]) is None
    # It was killed after these.
    warning = "(MainProcess pid=18775) WARNING 11-24 00:28:43 [vllm.py:1727] Inductor compilation was disabled"
    for line in (warning, "INFO 11-24 00:28:43 [x.py:1] starting", "warning: no fork with loaded weights"):
        assert last_error(["ValueError: of one before", line]) is None
    assert last_error([warning, "(EngineCore pid=7) ERROR 11-24 00:28:43 [core.py:9] ValueError: no"]) is not None


def test_a_selector_is_a_service_a_watcher_or_the_circusd(tmp_path: Path) -> None:
    for name in ("ns_A", "ns_A_1", "ns_Ab", "ns_Nats", "circusd", "stranger"):
        (tmp_path / f"{name}.log").touch()
    assert select(tmp_path, None) == ("ns_A", "ns_A_1", "ns_Ab")
    assert select(tmp_path, "A") == ("ns_A", "ns_A_1")
    assert select(tmp_path, "ns_A_1") == select(tmp_path, "A_1") == ("ns_A_1",)
    assert select(tmp_path, "ns_A") == ("ns_A",)
    assert select(tmp_path, "circusd") == ("circusd",)
    with pytest.raises(NotRunningError, match=r"no log of 'B'; there are: circusd, A, A_1, Ab, Nats"):
        select(tmp_path, "B")


def test_an_endpoint_selects_the_logs_of_its_workers_and_a_revision_those_of_its_own(tmp_path: Path) -> None:
    names = ("circusd", "ns_Frontend", "ns_VllmWorker", "ns_base@1_VllmWorker", "ns_chat@1_VllmWorker")
    for name in (*names, "ns_chat@2_VllmWorker", "ns_chat@2_VllmWorker_1"):
        (tmp_path / f"{name}.log").touch()
    newer = ("ns_chat@2_VllmWorker", "ns_chat@2_VllmWorker_1")
    assert select(tmp_path, "chat") == ("ns_chat@1_VllmWorker", *newer)
    assert select(tmp_path, "chat@2") == newer
    assert select(tmp_path, "chat@2_VllmWorker_1") == newer[1:]
    assert len(select(tmp_path, "VllmWorker")) == 5
    assert select(tmp_path, "circusd") == ("circusd",)
    with pytest.raises(NotRunningError, match=r"no log of 'chat@3'; there are: .*base@1_VllmWorker"):
        select(tmp_path, "chat@3")
    with pytest.raises(NotRunningError, match="no log of ''"):
        select(tmp_path, "")
