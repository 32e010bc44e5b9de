"""Endpoints without a minimum of workers, of a real server with mockers: asleep, woken, killed. The frontend is
imitated."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynamo_local.control.operations import GET_ENDPOINT, PARK_ENDPOINT, SCALE_ENDPOINT, UPDATE_ENDPOINT, WAKE_ENDPOINT
from dynamo_local.supervisor.admin.status import list_watchers
from tests.integration.endpoints.endpoint_server import SLOTS, EndpointServer
from tests.integration.server_process import eventually

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EndpointServer]:
    with EndpointServer(tmp_path / "state") as server:
        yield server
        print(server.rest_of_output())


def happened(server: EndpointServer, what: str) -> int:
    """How often the event log says so."""
    return server.paths.events_file.read_text().count(what)


def test_it_wakes_once_for_many_and_sleeps_again(server: EndpointServer) -> None:
    created = server.create("chat", min_workers=0, sleep_after_s=1.5)
    assert created.refused is None
    asleep = server.await_state("chat", "asleep")
    assert (asleep.wanted, asleep.ready) == (0, 0)
    eventually(lambda: server.board() == {"chat@1": True}, "it takes no requests")
    assert server.workers("chat@1") == []

    server.use(100)
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: server.ask(), range(100)))
    assert all(answer.refused is None for answer in answers)
    server.await_ready("chat")
    assert len(server.workers("chat@1")) == 1
    assert (happened(server, "woken by a request"), happened(server, "awake after")) == (1, 1)

    # Its worker is killed: it is started again, and nobody has to ask.
    (watcher,) = server.workers("chat@1")
    before = server.state().components[watcher].pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    eventually(lambda: server.state().components[watcher].pid not in (None, before), "it is not started again")
    server.await_ready("chat")

    server.use(0)
    server.await_state("chat", "asleep")
    chat = server.order(GET_ENDPOINT, "chat").view
    assert (chat.history.wakes, chat.history.sleeps) == ({"request": 1}, {"idle": 1})
    assert chat.history.last.startswith("asleep: no request for 1.5 s")
    eventually(lambda: server.workers("chat@1") == [], "its worker does not end")
    assert [row for row in asyncio.run(list_watchers(server.paths)) if row.endpoint] == []
    assert server.board() == {"chat@1": True}

    # An update of it is checked, and starts nothing.
    server.order(UPDATE_ENDPOINT, "chat", {"args": {"seed": 7}})
    eventually(lambda: server.board() == {"chat@2": True}, "the new revision takes no requests")
    server.await_state("chat", "asleep")
    assert server.workers("chat@2") == []
    server.order(WAKE_ENDPOINT, "chat")
    server.await_ready("chat", revision=2)

    # The next server wakes nobody.
    server.signal(signal.SIGKILL)
    server.process.wait()
    eventually(lambda: server.processes() == (), "a process outlives the server")
    with EndpointServer(server.paths.root) as again:
        again.await_state("chat", "asleep")
        again.ask()
        again.await_ready("chat", revision=2)


def test_a_start_is_broken_off_once_nobody_waits_for_it(server: EndpointServer) -> None:
    server.create("chat", min_workers=0, args={"mocker-start-s": 1000})
    eventually(lambda: server.board() == {"chat@1": True}, "it takes no requests")
    for _ in range(2):
        server.hold({"chat": 1})
        server.ask()
        server.await_reason("chat", "1 request waits")
        eventually(lambda: len(server.workers("chat@1")) == 1, "no worker starts")
        server.hold({})
        assert "nobody waits" in server.await_state("chat", "asleep").reason
        eventually(lambda: server.workers("chat@1") == [], "its worker does not end")
    assert happened(server, "cannot start") == 0
    # Its owner has it start, whoever waits.
    server.order(WAKE_ENDPOINT, "chat")
    eventually(lambda: len(server.workers("chat@1")) == 1, "no worker starts")
    server.hold({"chat": 1})
    server.ask()
    server.await_reason("chat", "1 request waits")
    server.hold({})
    server.await_reason("chat", "its workers start")


def test_what_cannot_be_done_is_said(server: EndpointServer) -> None:
    server.create("wrong", engine="vllm", model="/nowhere/model", min_workers=0)
    failed = server.await_state("wrong", "failed")
    assert "/nowhere/model" in failed.reason

    server.create("chat", min_workers=0)
    server.await_state("chat", "asleep")
    for operation, name, fields, status, cause in (
        (PARK_ENDPOINT, "chat", None, 409, "is asleep"),
        (SCALE_ENDPOINT, "chat", {"workers": 1}, 409, "is asleep"),
        (PARK_ENDPOINT, "nobody", None, 404, "no endpoint"),
        (WAKE_ENDPOINT, "nobody", None, 404, "no endpoint"),
    ):
        refused = server.order(operation, name, fields).refused
        assert refused is not None
        assert (refused.code, cause in refused.message) == (status, True), refused

    # Others have all devices: its owner is told who, and a request waits for one.
    server.create("busy", min_workers=SLOTS)
    server.await_ready("busy", workers=SLOTS)
    refused = server.order(WAKE_ENDPOINT, "chat").refused
    assert refused is not None
    assert (refused.code, "busy" in refused.message) == (409, True)
    server.use(1)
    server.ask()
    assert "slot" in server.await_state("chat", "waiting").reason
    server.order(UPDATE_ENDPOINT, "busy", {"min_workers": SLOTS - 1})
    server.order(SCALE_ENDPOINT, "busy", {"workers": SLOTS - 1})
    server.await_ready("chat")


def test_an_idle_endpoint_gives_its_device_to_one_that_is_asked_for(server: EndpointServer) -> None:
    names = [f"chat{number}" for number in range(SLOTS + 1)]
    for name in names:
        server.create(name, min_workers=0)
        server.await_state(name, "asleep")
    for name in names[:-1]:
        server.order(WAKE_ENDPOINT, name)
        server.await_ready(name)
    server.ask(names[-1])
    server.await_ready(names[-1])
    assert server.await_state(names[0], "asleep").reason.startswith("its device was given to")


def test_a_start_that_fails_is_told_and_repeated_only_for_a_request_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READY_S", "3")
    with EndpointServer(tmp_path / "state") as server:
        server.create("chat", min_workers=0, args={"mocker-start-s": 1000})
        server.await_state("chat", "asleep")
        server.use(1)
        for times in (1, 2):
            assert server.ask().refused is None
            assert "not ready within 3 s" in server.await_state("chat", "failed").reason
            refused = server.ask().refused
            assert refused is not None
            assert (refused.code, "not ready within 3 s" in refused.message) == (503, True)
            # After a pause, and not before somebody asks.
            assert "the last start failed" in server.await_state("chat", "asleep").reason
            assert happened(server, "cannot start") == times
        eventually(lambda: server.workers("chat@1") == [], "its worker does not end")


def test_a_model_that_changed_meanwhile_is_loaded_as_another_revision(server: EndpointServer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("old")
    server.create("chat", model=str(model), min_workers=0, max_workers=2)
    eventually(lambda: server.board() == {"chat@1": True}, "it takes no requests")
    (model / "weights").write_text("newer")
    server.hold({"chat": 1})
    server.ask()
    server.await_ready("chat", revision=2)
    assert happened(server, "its model's files have changed") == 1

    server.hold({})
    # A further worker would load others than the one that there is.
    (model / "weights").write_text("newest")
    server.order(SCALE_ENDPOINT, "chat", {"workers": 2})
    server.await_ready("chat", workers=2, revision=3)
    assert server.workers("chat@2") == []

    server.order(SCALE_ENDPOINT, "chat", {"workers": 0})
    eventually(lambda: server.workers("chat@3") == [], "its workers do not end")
    (model / "weights").unlink()
    model.rmdir()
    server.hold({"chat": 1})
    server.ask()
    failed = server.await_state("chat", "failed")
    assert f"the model's folder {model} cannot be read" in failed.reason
    assert "\n" not in failed.reason
    refused = server.ask().refused
    assert refused is not None
    assert (refused.code, "cannot be read" in refused.message) == (503, True)
    assert server.workers("chat@3") == []
