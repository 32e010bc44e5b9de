"""Adapters that are ordered of a real server, with mockers: their bases get room for them, and lose nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_local.control.operations import DELETE_ENDPOINT, GET_ENDPOINT, UPDATE_ENDPOINT
from dynamo_local.core.messages.endpoints import AdapterOrdered, Board
from tests.integration.endpoints.endpoint_server import Answered, EndpointServer
from tests.integration.server_process import eventually

pytestmark = pytest.mark.integration

WITHOUT_ROOM = "chat is rolled: its workers were started without room for adapters"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EndpointServer]:
    with EndpointServer(tmp_path / "state") as server:
        yield server


def adapter(server: EndpointServer, name: str, **fields: Any) -> Answered:
    return server.create(name, engine=None, model=f"/adapters/{name}", adapter_of="chat", **fields)


def ordered(answer: Answered) -> AdapterOrdered | None:
    assert answer.refused is None, answer.refused
    return answer.view.adapter


def adapters(server: EndpointServer) -> dict[str, dict[str, str]]:
    """By revision, the adapters on the board with their versions."""
    board = msgspec.json.decode(server.paths.board_file.read_bytes(), type=Board)
    return {each.revision: {one.name: one.version for one in each.adapters} for each in board.revisions}


def test_a_base_without_room_is_rolled_once_and_keeps_it(server: EndpointServer) -> None:
    server.create("chat")
    server.await_ready("chat")
    server.use(1)
    server.in_flight.write_text("1")
    assert ordered(adapter(server, "pirate")) == AdapterOrdered("rolled", WITHOUT_ROOM)
    status = server.status("pirate")
    assert status is not None
    assert (status.state, WITHOUT_ROOM in status.reason) == ("starting", True)
    assert adapters(server)["chat@1"] == {}
    second = ordered(adapter(server, "robot"))
    assert second is not None
    assert (second.result, "rolled already" in second.reason) == ("rolled", True)
    eventually(lambda: server.board() == {"chat@1": False, "chat@2": True}, "the new revision does not answer")
    # The old one's request is still under way, and the adapters are served.
    assert server.workers("chat@1") != []
    server.await_state("pirate", "ready")
    server.in_flight.write_text("0")
    server.await_ready("chat", revision=2)
    third = ordered(adapter(server, "parrot"))
    assert third is not None
    assert third.result == "loaded"
    before = adapters(server)["chat@2"]
    assert set(before) == {"pirate", "robot", "parrot"}

    # One of the same name is another one.
    server.order(DELETE_ENDPOINT, "pirate")
    assert set(adapters(server)["chat@2"]) == {"robot", "parrot"}
    adapter(server, "pirate")
    server.order(UPDATE_ENDPOINT, "robot", {"model": "/adapters/other"})
    after = adapters(server)["chat@2"]
    assert after["parrot"] == before["parrot"]
    assert {after[name] for name in ("pirate", "robot")}.isdisjoint(before.values())

    # The next server starts with room, and rolls nothing.
    server.signal(signal.SIGKILL)
    server.process.wait()
    eventually(lambda: server.processes() == (), "a process outlives the server")
    with EndpointServer(server.paths.root) as again:
        again.await_ready("chat", revision=2)
        again.await_state("pirate", "ready")
        assert adapters(again) == {"chat@2": after}
        assert "args" not in msgspec.to_builtins(again.order(GET_ENDPOINT, "chat").view.spec)


def test_what_the_owner_has_given_and_the_devices_are_respected(server: EndpointServer) -> None:
    server.create("chat", args={"enable-lora": False}, min_workers=1)
    server.await_ready("chat")
    refused = adapter(server, "pirate").refused
    assert refused is not None
    assert (refused.code, "--roll" in refused.message) == (409, True)
    server.create("others", min_workers=2)
    server.await_ready("others", workers=2)
    refused = adapter(server, "pirate", roll=True).refused
    assert refused is not None
    assert "no device is free for a worker of the new revision of chat" in refused.message
    assert set(server.registry().entries) == {"chat", "others"}
    rolled = ordered(adapter(server, "pirate", roll=True, replace=True))
    assert rolled is not None
    assert rolled.result == "rolled"
    server.await_ready("chat", revision=2)
    server.await_state("pirate", "ready")
    assert server.registry().entries["chat"].spec.args == {"enable-lora": True}
    assert server.registry().entries["chat"].earlier is None
