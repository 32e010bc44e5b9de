"""Orders for prepared processes as files, what is noticed of them, and the links by which launchers find a process."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from dynamo_local.core.names import Watcher
from dynamo_local.process.forkserver.prepared.manager import FolderWatch
from dynamo_local.process.forkserver.prepared.orders import (
    PreparedOrder,
    link_sockets,
    read_orders,
    withdraw,
    write_order,
)
from state.paths import StatePaths

GRAPHS = Watcher("ns", "VllmWorker")
REVISION = "chat@2"
ENDPOINTS = Watcher("ns", "VllmWorker", 0, REVISION)


def order(key: str) -> PreparedOrder:
    return PreparedOrder(key, "some.module", b"recipe", 10, 20)


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    found = StatePaths(tmp_path, "ns")
    found.prepared_dir.mkdir(parents=True)
    return found


def keys(paths: StatePaths) -> dict[Watcher, str]:
    return {watcher: found.order.key for watcher, found in read_orders(paths).items()}


def test_workers_of_one_service_and_revision_have_one_order(paths: StatePaths) -> None:
    write_order(paths, GRAPHS, order("a"))
    write_order(paths, Watcher("ns", "VllmWorker", 3), order("b"))
    write_order(paths, ENDPOINTS, order("c"))
    assert keys(paths) == {GRAPHS: "b", ENDPOINTS: "c"}
    assert read_orders(paths)[GRAPHS].order == order("b")


def test_orders_of_a_revision_are_withdrawn_and_no_others(paths: StatePaths) -> None:
    for watcher in (GRAPHS, ENDPOINTS, Watcher("ns", "PrefillWorker", 0, REVISION), Watcher("ns", "W", 0, "chat@22")):
        write_order(paths, watcher, order("a"))
    withdraw(paths, REVISION)
    assert set(keys(paths)) == {GRAPHS, Watcher("ns", "W", 0, "chat@22")}
    withdraw(paths, REVISION)


def test_each_time_that_an_order_is_written_is_another(paths: StatePaths) -> None:
    write_order(paths, GRAPHS, order("a"))
    first = read_orders(paths)[GRAPHS].number
    write_order(paths, GRAPHS, order("a"))
    assert read_orders(paths)[GRAPHS].number != first


def test_what_is_no_order_is_none(paths: StatePaths, capsys: pytest.CaptureFixture[str]) -> None:
    (paths.prepared_dir / "ns_VllmWorker.order").write_bytes(b"garbage")
    (paths.prepared_dir / "no watcher.order").write_bytes(b"")
    assert keys(paths) == {}
    assert "is no order for a prepared process" in capsys.readouterr().out


def test_without_a_forkserver_nothing_is_ordered(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path, "ns")
    write_order(paths, GRAPHS, order("a"))
    withdraw(paths, "")
    assert keys(paths) == {}
    assert not paths.run_dir.exists()


def test_links_lead_to_the_process_with_the_weights_that_were_ordered_last(paths: StatePaths) -> None:
    paths.prepared_socket("a").touch()
    link_sockets(paths, {GRAPHS: "a", ENDPOINTS: "a"})
    assert paths.prepared_socket(str(Watcher("ns", "VllmWorker", 7).first)).samefile(paths.prepared_socket("a"))
    assert paths.prepared_socket(str(ENDPOINTS)).exists()
    link_sockets(paths, {GRAPHS: "b"})
    assert not paths.prepared_socket(str(ENDPOINTS)).is_symlink()
    assert not paths.prepared_socket(str(GRAPHS)).exists()
    paths.prepared_socket("b").touch()
    assert paths.prepared_socket(str(GRAPHS)).samefile(paths.prepared_socket("b"))
    assert paths.prepared_socket("a").exists()


def test_changes_of_the_folder_are_noticed_once_each(paths: StatePaths) -> None:
    watch = FolderWatch(paths.prepared_dir)

    def changed() -> bool:
        return bool(select.select([watch.descriptor], [], [], 0)[0])

    assert not changed()
    write_order(paths, GRAPHS, order("a"))
    assert changed()
    watch.clear()
    assert not changed()
    write_order(paths, GRAPHS, order("a"))
    assert changed()
    watch.clear()
    withdraw(paths, "")
    assert changed()
    watch.clear()
    paths.prepared_dir.rmdir()
    assert changed()
    watch.close()


def test_a_folder_that_is_not_there_cannot_be_watched(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FolderWatch(tmp_path / "nowhere")
