"""Kill -9 of a process of a real server with mockers while its endpoint parks, is parked, sleeps or wakes: who asks for
it then gets it awake, with one worker. (`python -m benchmarks wake-kills` kills all of them, under real requests.)"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynamo_local.control.operations import PARK_ENDPOINT, SCALE_ENDPOINT
from state.machine.processes import command_name
from tests.integration.endpoints.endpoint_server import EndpointServer
from tests.integration.server_process import eventually

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EndpointServer]:
    with EndpointServer(tmp_path / "state") as server:
        server.create("chat", min_workers=0, max_workers=1)
        eventually(lambda: server.board() == {"chat@1": True}, "it takes no requests")
        yield server
        print(server.rest_of_output())


def worker(server: EndpointServer) -> int | None:
    """Its pid, while there is one."""
    pids = [server.state().components[watcher].pid for watcher in server.workers("chat@1")]
    return pids[0] if pids else None


def nats(server: EndpointServer) -> int:
    (pid,) = [each.pid for each in server.processes() if command_name(each.pid) == "nats-server"]
    return pid


PIDS: dict[str, Callable[[EndpointServer], int | None]] = {
    "worker": worker,
    "circusd": lambda server: server.circusd_pid(),
    "nats": nats,
    "frontend": lambda server: server.pid("Frontend"),
}


def come_to(server: EndpointServer, moment: str) -> None:
    """Have the endpoint in that state, or on the way there."""
    if moment in ("asleep", "waking"):
        server.order(SCALE_ENDPOINT, "chat", {"workers": 0})
        eventually(lambda: server.workers("chat@1") == [], "its worker does not end")
        server.await_state("chat", "asleep")
    else:
        wake(server)
        server.order(PARK_ENDPOINT, "chat")
    if moment == "parked":
        server.await_state("chat", "parked")
    if moment == "waking":
        server.ask()
        eventually(lambda: worker(server) is not None, "no worker starts")


def wake(server: EndpointServer) -> None:
    """Ask for it until it is awake, as a frontend does that holds a request. Nothing is refused meanwhile."""
    server.hold({"chat": 1})

    def is_ready() -> bool:
        assert server.ask().refused is None
        return server.is_ready("chat")

    eventually(is_ready, "it does not wake")
    server.hold({})


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param((("parked", "worker"), ("parking", "worker"), ("waking", "worker")), id="worker"),
        pytest.param((("parked", "nats"), ("asleep", "circusd"), ("waking", "frontend")), id="others"),
    ],
)
def test_whoever_asks_after_a_kill_finds_it_awake(server: EndpointServer, kills: tuple[tuple[str, str], ...]) -> None:
    for moment, part in kills:
        come_to(server, moment)
        pid = PIDS[part](server)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wake(server)
        assert len(server.workers("chat@1")) == 1, (moment, part)
        assert server.process.poll() is None
