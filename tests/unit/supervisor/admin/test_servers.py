"""Rows of `dynamo ls`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.core.messages.endpoints import Board, BoardRevision, ServedAdapter
from dynamo_local.supervisor.admin.servers import Age, ServerRow, list_servers, served_models, server_row
from state.files import make_run_directory
from state.locks import ServerLock
from state.machine.processes import this_process
from state.paths import StatePaths
from state.record import ServerPhase, ServerRecord, write_record
from state.statefile.model import Owner, State
from state.statefile.store import StateStore
from state.statefile.transitions import claim, new_state

URL = "http://127.0.0.1:8000"
AGE = Age("2026-01-02T03:04:05+00:00", 7.0)


def running(namespace: str, owner: Owner) -> State:
    state = new_state(namespace, "ipc:///run/circus.sock", "cpu-slot", owner)
    state = claim(state, f"{namespace}_Frontend", role="frontend", cmd="f")
    state = claim(state, f"{namespace}_VllmWorker", role="decode", cmd="w", devices=[1])
    return claim(state, f"{namespace}_PrefillWorker", role="prefill", cmd="w", devices=[0])


def row(
    *,
    running: bool = True,
    state: State | None = None,
    damage: str | None = None,
    record: ServerRecord | None = None,
    pid: int | None = None,
) -> ServerRow:
    return server_row("n", running=running, pid=pid, state=state, damage=damage, record=record, age=AGE)


def test_a_server_that_runs_has_its_url_models_workers_and_devices() -> None:
    found = row(state=running("n", Owner(5, 6)), record=ServerRecord("running", URL, ("m",)), pid=5)
    assert found == ServerRow(
        namespace="n",
        state="running",
        pid=5,
        url=URL,
        models=("m",),
        workers=2,
        devices=(0, 1),
        device_kind="cpu-slot",
        since=AGE.since,
        age_s=7.0,
    )


@pytest.mark.parametrize("phase", ["starting", "running", "stopping"])
def test_the_state_is_what_the_server_has_recorded(phase: ServerPhase) -> None:
    assert row(state=running("n", Owner(5, 6)), record=ServerRecord(phase)).state == phase


def test_models_are_the_servers_own_and_those_of_endpoints_that_take_requests() -> None:
    chat = BoardRevision("chat@1", True, ("chat", "talk"), (ServedAdapter("tuned", "/a"),))
    board = Board(1, (chat, BoardRevision("chat@2", False, ("chat", "new")), BoardRevision("m@1", True, ("m",))))
    assert served_models(ServerRecord("running", URL, ("m",)), board) == ("m", "chat", "talk", "tuned")
    assert served_models(None, board) == ("chat", "talk", "tuned", "m")
    assert served_models(None, None) == ()


def test_what_is_not_known_is_none() -> None:
    found = row(pid=0)
    assert found.state == "starting"
    assert (found.pid, found.url, found.workers, found.devices, found.device_kind) == (None,) * 5


def test_a_damaged_statefile_is_told_and_the_server_runs_nevertheless() -> None:
    found = row(damage="cannot read it", record=ServerRecord("running", URL), pid=5)
    assert (found.state, found.note, found.workers, found.url, found.pid) == ("running", "cannot read it", None, URL, 5)
    assert row(damage="cannot read it", pid=5).state == "running"


def test_a_crashed_server_has_neither_url_nor_workers_whatever_it_has_recorded() -> None:
    found = row(running=False, state=running("n", Owner(5, 6)), record=ServerRecord("running", URL, ("m",)))
    note = "`dynamo stop --namespace n` removes what it left"
    assert found == ServerRow(namespace="n", state="crashed", note=note)
    assert row(running=False, damage="cannot read it").note == f"cannot read it; {note}"


def test_servers_are_listed_those_that_run_first(tmp_path: Path) -> None:
    assert list_servers(tmp_path / "none") == []
    for namespace, owner in (("a", Owner(1, 1)), ("b", this_process())):
        StateStore(StatePaths(tmp_path, namespace)).create(running(namespace, owner))
    paths = StatePaths(tmp_path, "b")
    with ServerLock(paths):
        make_run_directory(paths)
        write_record(paths, ServerRecord("running", URL, ("m",)))
        first, second = list_servers(tmp_path)
        paths.statefile.write_text("{")
        damaged, _ = list_servers(tmp_path)
    assert (first.namespace, first.state, first.url, first.workers) == ("b", "running", URL, 2)
    assert first.age_s is not None
    assert first.age_s >= 0
    assert (second.namespace, second.state) == ("a", "crashed")
    assert damaged.state == "running"
    assert str(paths.statefile) in damaged.note
