"""Endpoints that take turns on one device, of a real server with mockers. Clients and frontend are imitated."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.control.operations import WAKE_ENDPOINT
from dynamo_local.supervisor.server.reports.event_log import EventReader
from tests.integration.endpoints.endpoint_server import EndpointServer
from tests.integration.endpoints.imitated_clients import Clients, Request
from tests.integration.server_process import eventually

pytestmark = pytest.mark.integration

TURN_S = 3.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EndpointServer]:
    with EndpointServer(tmp_path / "state", slots=1, turn_s=TURN_S) as server:
        for name in ("a", "b", "c"):
            assert server.create(name, min_workers=0).refused is None
        for name in ("a", "b", "c"):
            server.await_state(name, "asleep")
        yield server


def starts(server: EndpointServer) -> int:
    """How often a worker has become ready for those that asked."""
    return server.paths.events_file.read_text().count("awake after")


def test_a_queue_of_mixed_requests_takes_few_starts_and_a_running_request_is_never_cut(server: EndpointServer) -> None:
    clients = Clients(server.paths, server.in_flight)
    clients.run([Request(name, 0.3) for name in "abaacabc"])
    assert starts(server) <= 4
    assert not clients.cut

    # A request runs twice as long as a turn, and the next endpoint waits for it. Neither has the device before: that a
    # request began in the very moment in which its endpoint's device is wanted would be seen too late.
    clients.run([Request("c", 0.1)])
    before = starts(server)
    long, other = Request("a", 2 * TURN_S), Request("b", 0.1)
    clients.run([long, other])
    first, last = (long, other) if (long.began_at or 0) < (other.began_at or 0) else (other, long)
    assert first.ended_at is not None
    assert last.began_at is not None
    assert last.began_at >= first.ended_at
    assert not clients.cut
    assert starts(server) - before <= 2
    log = server.paths.events_file.read_text()
    assert "yields its device to" in log
    ended = [event for event in EventReader(server.paths.events_file).all() if event.kind == "swap" and event.took_s]
    assert {(event.endpoint, event.to) for event in ended} <= {(a, b) for a in "abc" for b in "abc" if a != b}
    assert len(ended) >= 2
    views = server.views()
    assert sum(view.history.swaps for view in views) == len(ended)
    assert "asked for" in log


def test_two_busy_endpoints_take_turns_and_one_that_is_killed_meanwhile_loses_nothing(server: EndpointServer) -> None:
    clients = Clients(server.paths, server.in_flight)
    # Without turns the first would keep the device for as long as it is asked.
    before = starts(server)
    clients.run([Request("c", 0.2)], busy="ab")
    served = {one.endpoint for one in clients.requests if one.ended_at}
    assert served == {"a", "b", "c"}
    assert not clients.cut
    assert starts(server) - before >= 3
    log = server.paths.events_file.read_text()
    assert f"its turn of {TURN_S} s is over" in log

    # The worker of the endpoint that gets the device is killed while it starts.
    done = threading.Event()

    def kill() -> None:
        def component() -> int | None:
            found = (c.pid for c in server.state().components.values() if c.watcher.revision == "c@1" and c.holds)
            return next(found, None)

        eventually(lambda: component() is not None, "no worker of c starts")
        pid = component()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        done.set()

    killer = threading.Thread(target=kill)
    killer.start()
    clients.run([Request("c", 0.3), Request("c", 0.3), Request("b", 0.3)])
    killer.join(30)
    assert done.is_set()
    assert all(one.ended_at for one in clients.requests)


def test_an_owner_may_wake_one_while_another_is_idle_and_a_schedule_takes_what_is_not_used(
    server: EndpointServer,
) -> None:
    assert server.order(WAKE_ENDPOINT, "a").refused is None
    server.await_ready("a")
    # Nobody asks for it.
    server.create("kept", min_workers=0, awake=["daily 00:00-24:00"])
    server.await_ready("kept")
    assert "its device was given to kept" in server.await_state("a", "asleep").reason
    assert server.order(WAKE_ENDPOINT, "b").refused is None
    server.await_ready("b")
    assert "its device was given to b" in server.await_state("kept", "asleep").reason
    server.await_ready("kept")
