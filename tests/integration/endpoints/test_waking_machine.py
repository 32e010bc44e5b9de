"""Endpoints that wake on a machine of which a device is gone, or memory is short. The facts are made up; the rest is a
real server with mockers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.control.operations import PARK_ENDPOINT, WAKE_ENDPOINT
from tests.integration.endpoints.endpoint_server import SLOTS, EndpointServer
from tests.integration.server_process import eventually

pytestmark = pytest.mark.integration

GONE = {number: f"offline: {number}" for number in range(SLOTS)}
LOST = "CPU slot 0 is gone (offline: 0)"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EndpointServer]:
    with EndpointServer(tmp_path / "state") as server:
        server.create("chat", min_workers=0)
        eventually(lambda: server.board() == {"chat@1": True}, "it takes no requests")
        yield server
        print(server.rest_of_output())


def is_refused(server: EndpointServer, *parts: str) -> None:
    """Ask for it: it fails with this reason, which those who ask are told, until they ask again after a pause."""
    assert server.ask().refused is None
    failed = server.await_state("chat", "failed")
    assert all(part in failed.reason for part in parts), failed.reason
    refused = server.ask().refused
    assert refused is not None
    assert (refused.code, parts[0] in refused.message) == (503, True)


def wakes_again(server: EndpointServer) -> None:
    eventually(lambda: server.ask().refused is None, "it is not tried again")
    server.await_ready("chat")


def park(server: EndpointServer) -> None:
    server.order(PARK_ENDPOINT, "chat")
    server.await_state("chat", "parked")


def test_without_a_device_it_does_not_wake(server: EndpointServer) -> None:
    server.hold({"chat": 1})
    server.make_up(gone=GONE)
    is_refused(server, LOST, "bring its cores online again")
    assert server.workers("chat@1") == []
    server.make_up()
    wakes_again(server)


def test_a_parked_worker_whose_device_is_gone_is_replaced_or_refused(server: EndpointServer) -> None:
    server.order(WAKE_ENDPOINT, "chat")
    server.await_ready("chat")
    park(server)
    server.hold({"chat": 1})
    server.make_up(gone={0: GONE[0]})
    wakes_again(server)
    (worker,) = server.workers("chat@1")
    assert server.state().components[worker].devices == (1,)
    assert "cannot start" not in server.paths.events_file.read_text()

    server.hold({})
    park(server)
    server.hold({"chat": 1})
    server.make_up(gone=GONE)
    is_refused(server, LOST)
    assert server.workers("chat@1") == []
    server.make_up()
    wakes_again(server)


def test_without_memory_it_does_not_wake(server: EndpointServer) -> None:
    server.create("other")
    server.await_ready("other")
    server.hold({"chat": 1})
    server.make_up(free_gib=2)
    is_refused(server, "2.0 GiB of memory is free, and 1 more worker needs 3.0 GiB", "endpoint other holds")
    assert server.workers("chat@1") == []
    server.make_up(free_gib=3)
    wakes_again(server)
    workers = server.workers("chat@1")

    # What is parked stays parked.
    server.hold({})
    park(server)
    server.hold({"chat": 1})
    server.make_up(free_gib=0.5)
    needs = "0.5 GiB of memory is free, and 1 parked worker needs 1.0 GiB"
    is_refused(server, needs, "endpoint other holds")
    assert server.workers("chat@1") == workers
    # After a pause the reason is told all the same.
    assert needs in server.await_state("chat", "parked").reason
    server.make_up(free_gib=1)
    wakes_again(server)
    assert server.workers("chat@1") == workers
