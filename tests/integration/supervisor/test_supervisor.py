"""circus as it is: what the client makes of its answers, its restarts and its events; and our NATS server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, SupervisorError
from dynamo_local.process.groups import kill_group, members
from dynamo_local.supervisor.circus.client import CircusClient, EventStream, ProcessBegan, ProcessEnded
from dynamo_local.supervisor.circus.daemon import CircusDaemon, CircusFiles
from dynamo_local.supervisor.circus.watchers import WatcherSpec
from dynamo_local.supervisor.server.nats.nats_server import NatsServer, bring_up
from state.machine.processes import start_time
from tests.integration.sockets import LISTENS, LOOPBACK, kernel_sockets, socket_inodes

pytestmark = pytest.mark.integration

SLEEP = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")


@dataclass
class Box:
    """A running circusd with a client, in a directory whose name needs quoting."""

    directory: Path
    circusd: CircusDaemon
    circus: CircusClient
    events: EventStream

    def spec(self, name: str, *argv: str, **environment: str) -> WatcherSpec:
        settings = {"PYTHONPATH": str(Path(__file__).parents[3]), **environment}
        return WatcherSpec(name, argv, settings, self.directory, self.directory / f"{name}.log")

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()


@asynccontextmanager
async def subscribed(endpoint: str) -> AsyncIterator[EventStream]:
    """A stream that has been accepted: what happens before that, it misses."""
    stream = EventStream(endpoint)
    monitor = stream._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    async with stream:
        try:
            async with asyncio.timeout(60):
                await monitor.recv_multipart()
        finally:
            stream._socket.disable_monitor()
            monitor.close(linger=0)
        yield stream


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    directory = tmp_path / "with blank, 100% #1 ;x"
    directory.mkdir()
    endpoint, events = f"ipc://{directory}/c.sock", f"ipc://{directory}/c.pub"
    files = CircusFiles(endpoint, events, directory / "circus.ini", directory / "circusd.log")
    circusd = CircusDaemon.spawn(files, {**os.environ, "NATS_TOKEN": "secret", "KEPT": "yes"})
    async with CircusClient(endpoint) as circus, subscribed(events) as stream:
        await circus.statuses()
        yield Box(directory, circusd, circus, stream)
        if circusd.running:
            await circus.quit()
    await circusd.end(10)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)


async def next_event(box: Box) -> ProcessBegan | ProcessEnded:
    async with asyncio.timeout(60):
        return await box.events.next()


async def process_ended(box: Box) -> ProcessEnded:
    while not isinstance(event := await next_event(box), ProcessEnded):
        pass
    return event


async def test_a_watcher_runs_until_it_is_removed(box: Box) -> None:
    await box.circus.add(box.spec("ns_A", *SLEEP))
    (pid,) = await box.circus.pids("ns_A")
    assert await box.circus.statuses() == {"ns_A": "active"}
    await box.circus.remove("ns_A")
    assert await box.circus.statuses() == {}
    assert await box.circus.pids("ns_A") == ()
    assert start_time(pid) is None


async def test_processes_lead_groups_of_circusds_session(box: Box) -> None:
    """Linux shares cores among sessions first: one that computes starves others that are awake for moments."""
    for name in ("ns_A", "ns_B"):
        await box.circus.add(box.spec(name, *SLEEP))
        (pid,) = await box.circus.pids(name)
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == os.getsid(box.circusd.pid) == box.circusd.pid


async def test_adding_again_and_removing_again_do_no_harm(box: Box) -> None:
    for _ in range(2):
        await box.circus.add(box.spec("ns_A", *SLEEP))
    assert len(await box.circus.pids("ns_A")) == 1
    await box.circus.start("ns_A")
    assert len(await box.circus.pids("ns_A")) == 1
    for _ in range(2):
        await box.circus.remove("ns_A")


async def test_many_commands_at_once_all_get_through(box: Box) -> None:
    names = [f"ns_A_{index}" for index in range(1, 9)]
    await asyncio.gather(*(box.circus.add(box.spec(name, "/bin/sleep", "600")) for name in names))
    assert set((await box.circus.statuses()).values()) == {"active"}
    await asyncio.gather(*(box.circus.remove(name) for name in names))
    assert await box.circus.statuses() == {}


async def test_a_process_that_ends_is_told_of_and_not_restarted_by_circus(box: Box) -> None:
    await box.circus.add(box.spec("ns_A", "/bin/sh", "-c", "exit 7"))
    ended = await process_ended(box)
    assert (ended.watcher, ended.exit_code) == ("ns_a", 7)

    async def stopped() -> bool:
        return await box.circus.statuses() == {"ns_A": "stopped"}

    await until(stopped)
    await box.circus.start("ns_A")
    began = await next_event(box)
    assert isinstance(began, ProcessBegan)
    assert await process_ended(box) == ProcessEnded("ns_a", began.pid, 7)


async def test_both_streams_reach_the_log_to_the_last_line(box: Box) -> None:
    script = "import sys; print('out ' * 5000, flush=True); sys.exit('error: the last line')"
    await box.circus.add(box.spec("ns_A", sys.executable, "-c", script))
    await process_ended(box)
    assert box.log("ns_A").endswith("error: the last line\n")
    assert box.log("ns_A").count("out ") == 5000


async def test_a_command_that_cannot_start_says_so_in_its_log(box: Box) -> None:
    await box.circus.add(box.spec("ns_A", "/does/not/exist"))
    ended = await process_ended(box)
    assert ended.exit_code not in (None, 0)
    assert "/does/not/exist" in box.log("ns_A")


async def test_arguments_and_settings_arrive_as_they_are(box: Box) -> None:
    script = "import os, sys; print(sys.argv[1:], os.environ['A'], os.environ['KEPT'], os.getcwd())"
    arguments = ("a b", "'\"", "$HOME")
    await box.circus.add(box.spec("ns_A", sys.executable, "-c", script, *arguments, A="x y"))
    await process_ended(box)
    assert box.log("ns_A").strip() == f"['a b', '\\'\"', '$HOME'] x y yes {box.directory}"


async def test_secrets_of_the_bus_are_not_handed_to_services(box: Box) -> None:
    await box.circus.add(box.spec("ns_A", "/usr/bin/env"))
    await process_ended(box)
    assert "NATS_TOKEN" not in box.log("ns_A")


async def test_a_process_group_is_found_and_killed_without_its_leader(box: Box) -> None:
    script = "import os, time; os.fork() or (os.fork() and os._exit(0)); time.sleep(600)"
    await box.circus.add(box.spec("ns_A", "/bin/sh", "-c", f"{sys.executable} -c '{script}' & sleep 600"))
    (leader,) = await box.circus.pids("ns_A")

    async def forked() -> bool:
        return len(members(leader)) > 2

    await until(forked)
    os.kill(leader, signal.SIGKILL)

    async def leader_gone() -> bool:
        return leader not in members(leader)

    await until(leader_gone)
    kill_group(leader)

    async def all_gone() -> bool:
        return members(leader) == ()

    await until(all_gone)
    kill_group(leader)


async def test_circusd_listens_on_its_two_sockets_only(box: Box) -> None:
    inodes = socket_inodes(box.circusd.pid)
    assert inodes
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        assert inodes.isdisjoint(row[9] for row in kernel_sockets(protocol))


async def test_a_dead_circusd_is_an_error_with_a_deadline(tmp_path: Path) -> None:
    async with CircusClient(f"ipc://{tmp_path}/none.sock", deadline_s=0.2) as circus:
        with pytest.raises(SupervisorError, match=r"circus did not answer status within 0\.2 s"):
            await circus.statuses()


# Answers that the real circusd gives only at unlucky moments.


@asynccontextmanager
async def scripted(
    tmp_path: Path, answers: list[dict[str, object]], deadline_s: float = 5.0
) -> AsyncIterator[CircusClient]:
    """A client of a stand-in that gives the answers in turn, then none."""
    endpoint = f"ipc://{tmp_path}/stand-in.sock"

    async def answer(router: zmq.asyncio.Socket) -> None:
        for reply in answers:
            peer, request = await router.recv_multipart()
            await router.send_multipart([peer, json.dumps({"id": json.loads(request)["id"], **reply}).encode()])

    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        answering = asyncio.create_task(answer(router))
        async with CircusClient(endpoint, deadline_s=deadline_s) as circus:
            yield circus
        answering.cancel()
        await asyncio.wait({answering})


OK: dict[str, object] = {"status": "ok"}
CONFLICT: dict[str, object] = {
    "status": "error",
    "errno": 5,
    "tb": None,
    "reason": "already running x command",
}
BROKEN: dict[str, object] = {"status": "error", "errno": 5, "tb": "Traceback", "reason": "command failed"}
LATE: dict[str, object] = {"status": "ok", "id": "another", "statuses": {"ns_Late": "active"}}


async def test_a_conflict_is_tried_again(tmp_path: Path) -> None:
    async with scripted(tmp_path, [CONFLICT, CONFLICT, OK]) as circus:
        await circus.start("ns_A")


async def test_a_lasting_conflict_ends_at_the_deadline(tmp_path: Path) -> None:
    async with scripted(tmp_path, [CONFLICT] * 1000, deadline_s=0.3) as circus:
        with pytest.raises(SupervisorError, match="start ns_A"):
            await circus.start("ns_A")


async def test_a_failure_is_not_tried_again(tmp_path: Path) -> None:
    async with scripted(tmp_path, [BROKEN]) as circus:
        with pytest.raises(SupervisorError, match="circus refused start ns_A: command failed"):
            await circus.start("ns_A")


async def test_an_answer_to_somebody_else_is_not_taken(tmp_path: Path) -> None:
    async with scripted(tmp_path, [LATE], deadline_s=0.3) as circus:
        with pytest.raises(SupervisorError, match="did not answer"):
            await circus.statuses()


# NATS


async def test_nats_wants_its_token_and_comes_back_on_its_port(box: Box) -> None:
    server = NatsServer.at(box.directory / "nats")
    server.write_files()
    spec = box.spec("ns_Nats", *server.argv, DYN_PARENT_PID=str(box.circusd.pid))
    started, pid = await bring_up(server, spec, box.circus, 60)
    address = started.address
    with pytest.raises(BusError):
        await Bus.connect(BusAddress(address.url, "wrong"), name="stranger", deadline_s=1)
    bus = await Bus.connect(address, name="friend")
    await bus.flush()
    await bus.close()
    os.kill(pid, signal.SIGKILL)
    await process_ended(box)

    async def stopped() -> bool:
        return await box.circus.statuses() == {"ns_Nats": "stopped"}

    await until(stopped)
    await box.circus.start("ns_Nats")
    bus = await Bus.connect(address, name="friend again")
    await bus.close()


async def test_nats_listens_on_loopback_only(box: Box) -> None:
    server = NatsServer.at(box.directory / "nats")
    server.write_files()
    spec = box.spec("ns_Nats", *server.argv, DYN_PARENT_PID=str(box.circusd.pid))
    started, _ = await bring_up(server, spec, box.circus, 60)
    port = int(started.address.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), 5):
        pass
    listening = [row[1] for protocol in ("tcp", "tcp6") for row in kernel_sockets(protocol) if row[3] == LISTENS]
    ours = [address for address in listening if address.endswith(f":{port:04X}")]
    assert ours
    assert all(address.startswith(LOOPBACK) for address in ours)


async def test_a_nats_that_does_not_start_is_told_with_its_last_words(box: Box) -> None:
    server = NatsServer.at(box.directory / "nats")
    server.write_files()
    server.config_path.write_text("nonsense {")
    spec = box.spec("ns_Nats", *server.argv, DYN_PARENT_PID=str(box.circusd.pid))
    with pytest.raises(SupervisorError, match=r"NATS did not start within 2 s: .*Parse error on line 1"):
        await bring_up(server, spec, box.circus, 2)
