"""Endpoints of a real server, with mockers, ordered by its control API; the frontend is imitated."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.control.operations import DELETE_ENDPOINT, SCALE_ENDPOINT, UPDATE_ENDPOINT
from dynamo_local.core.messages.endpoints import EndpointStatus
from tests.integration.endpoints.endpoint_server import SLOTS, EndpointServer
from tests.integration.server_process import eventually

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EndpointServer]:
    with EndpointServer(tmp_path / "state") as server:
        yield server


def test_endpoints_come_and_go_and_outlive_the_server(server: EndpointServer, tmp_path: Path) -> None:
    created = server.create("chat", max_workers=2)
    assert created.view.status.state in ("fetching", "starting")
    assert set(server.registry().entries) == {"chat"}, "an order is on disk before it is answered"
    server.create("other")
    server.await_ready("chat")
    server.await_ready("other")

    # An endpoint that is deleted while it starts.
    server.create("brief")
    assert server.order(DELETE_ENDPOINT, "brief").view.status.state == "deleting"
    eventually(lambda: server.status("brief") is None, "brief is still there")
    assert server.workers("brief@1") == []
    assert not server.paths.graph_of("brief@1").exists()

    server.order(SCALE_ENDPOINT, "chat", {"workers": 2})
    server.await_ready("chat", workers=2)
    assert server.board() == {"chat@1": True, "other@1": True}

    # Killed, the server leaves the registry, and the next one brings the same endpoints up.
    server.signal(signal.SIGKILL)
    server.process.wait()
    eventually(lambda: server.processes() == (), "a process outlives the server")
    with EndpointServer(server.paths.root) as again:
        again.await_ready("chat")
        again.await_ready("other")
        again.signal(signal.SIGTERM)
        assert again.end() == 0, again.output
        assert again.processes() == ()
        assert set(again.registry().entries) == {"chat", "other"}


def test_updates_roll_and_go_back(server: EndpointServer) -> None:
    server.create("chat")
    server.await_ready("chat")
    server.in_flight.write_text("2")
    server.order(UPDATE_ENDPOINT, "chat", {"args": {"seed": 7}})
    eventually(lambda: server.board() == {"chat@1": False, "chat@2": True}, "the new revision does not answer")
    # The old one has two requests under way.
    finishing = EndpointStatus("updating", "2 requests under way", 2, wanted=1, ready=1)
    eventually(lambda: server.status("chat") == finishing, f"not {finishing}: {server.status('chat')}")
    assert server.workers("chat@1") != []
    server.in_flight.write_text("0")
    server.await_ready("chat", revision=2)
    assert server.board() == {"chat@2": True}
    assert server.workers("chat@1") == []

    # What cannot be loaded is gone back from, and nothing was disturbed.
    missing = {"engine": "vllm", "model": "/nowhere/model"}
    server.order(UPDATE_ENDPOINT, "chat", missing)
    eventually(lambda: "failed" in (server.status("chat") or EndpointStatus("ready")).reason, "it does not go back")
    status = server.status("chat")
    assert status is not None
    assert (status.state, status.revision) == ("ready", 2)
    assert "/nowhere/model" in status.reason
    assert server.board() == {"chat@2": True}
    assert server.registry().entries["chat"].spec.engine == "mocker"


def test_what_cannot_be_done_is_said_in_one_line(server: EndpointServer) -> None:
    server.create("lost", engine="vllm", model="/nowhere/model")
    eventually(lambda: (server.status("lost") or EndpointStatus("waiting")).state == "failed", "it does not fail")
    status = server.status("lost")
    assert status is not None
    assert "/nowhere/model" in status.reason
    assert "\n" not in status.reason

    many = server.create("many", min_workers=SLOTS + 1)
    assert many.refused is not None
    assert many.refused.code == 400
    assert f"{SLOTS + 1} CPU slots" in many.refused.message
    assert f"there are {SLOTS}" in many.refused.message

    twice = server.create("lost")
    assert twice.refused is not None
    assert twice.refused.code == 409
    absent = server.order(DELETE_ENDPOINT, "nobody")
    assert absent.refused is not None
    assert absent.refused.code == 404
    beyond = server.order(SCALE_ENDPOINT, "lost", {"workers": 2})
    assert beyond.refused is not None
    assert beyond.refused.code == 400
    assert set(server.registry().entries) == {"lost"}

    # It stays listed, so that it can be corrected.
    server.order(UPDATE_ENDPOINT, "lost", {"engine": "mocker", "model": "random"})
    server.await_ready("lost", revision=2)
