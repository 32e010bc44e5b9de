"""Service processes as the server starts them, on a real NATS server. Only the server itself is missing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.rpc import CallClient
from dynamo_local.core.messages.presence import LeaseRevoked, Presence, ProcessState
from dynamo_local.core.names import Watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk import load_graph
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.resolved import ResolvedGraph
from examples.hello_world.hello_world import Frontend
from state.locks import FileLock
from state.paths import STATE_DIR_VARIABLE, StatePaths
from state.statefile.model import Owner, State
from state.statefile.store import StateStore
from state.statefile.transitions import claim, new_state, release, set_role, unclaim
from tests.integration.hosted_services import Moody, Plain
from tests.integration.nats_process import running_nats
from tests.unit.state.builders import with_process

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
MOODY = "tests.integration.hosted_services:Moody"
HELLO = "examples.hello_world.hello_world:Frontend"


@dataclass
class Process:
    """A started service process."""

    process: asyncio.subprocess.Process
    output: list[str] = field(default_factory=list)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def finished(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    async def says(self, line: str) -> None:
        await until(lambda: line in self.output)

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output if line.startswith("error:")]


@dataclass
class Server:
    """The part of `dynamo serve` that prepares files for the processes of one graph, and hears their presences."""

    graph: ResolvedGraph
    paths: StatePaths
    bus: Bus
    stack: AsyncExitStack
    heard: list[Presence] = field(default_factory=list)

    @property
    def store(self) -> StateStore:
        return StateStore(self.paths)

    async def start(self, service: str, **environment: str) -> Process:
        watcher = str(Watcher(self.graph.namespace, service))
        given = {STATE_DIR_VARIABLE: str(self.paths.root), "DYN_WATCHER": watcher, "PYTHONPATH": os.getcwd()}  # noqa: PTH109
        process = await asyncio.create_subprocess_exec(
            *command(self.graph.namespace, service),
            env={**os.environ, **given, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        started = Process(process)
        reading = asyncio.create_task(_read(started))
        self.stack.push_async_callback(_stop, process, reading)
        return started

    async def hears(self, service: str, state: ProcessState) -> Presence:
        """The first presence of that service in that state."""
        found: list[Presence] = []

        def look() -> bool:
            found[:] = [p for p in self.heard if (p.component, p.state) == (service, state)]
            return bool(found)

        await until(look)
        return found[0]

    async def client(self) -> CallClient:
        client = CallClient(self.bus, Subjects(self.graph.namespace))
        await client.start()
        return client


def command(namespace: str, service: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "dynamo_local.process.main", "--namespace", namespace, "--service", service)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.01)


async def _read(started: Process) -> None:
    assert started.process.stdout is not None
    async for line in started.process.stdout:
        started.output.append(line.decode().rstrip())


async def _stop(process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
    await reading


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusAddress]:
    with running_nats(tmp_path_factory.mktemp("nats")) as address:
        yield address


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def prepare(address: BusAddress, root: Path, stack: AsyncExitStack, target: str, *overrides: str) -> Server:
    namespace = f"t{uuid.uuid4().hex[:12]}"
    graph = resolve(load_graph(target), overrides=overrides, namespace=namespace)
    paths = StatePaths(root, namespace)
    paths.run_dir.mkdir(mode=0o700)
    paths.graph_file.write_bytes(graph.to_json())
    paths.bus_file.write_bytes(msgspec.json.encode(address))
    state = new_state(namespace, "ipc:///nowhere", "cpu-slot", Owner(os.getpid(), 0))
    for service in graph.services:
        state = claim(state, Watcher(namespace, service.name), role=service.role, cmd="host")
    bus = await Bus.connect(address, name="test")
    stack.push_async_callback(bus.close)
    server = Server(graph, paths, bus, stack)
    server.store.create(state)

    async def on_presence(presence: Presence) -> None:
        server.heard.append(presence)

    await bus.listen(Subjects(namespace).presences, Presence, on_presence)
    await bus.flush()
    return server


async def test_the_life_of_a_service(nats: BusAddress, tmp_path: Path, stack: AsyncExitStack) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY)
    plain, moody = await server.start("Plain"), await server.start("Moody")
    await server.hears("Moody", "starting")
    ready = await server.hears("Moody", "ready")
    await server.hears("Plain", "ready")

    assert (ready.pid, ready.role) == (moody.process.pid, "service")
    client = await server.client()
    assert await client.service(Moody).ask() == f"pong for {ready.watcher}"

    moody.end()
    await server.hears("Moody", "draining")
    assert await moody.finished() == 0
    assert moody.output[-2:] == ["first hook", "second hook"]
    assert moody.errors == []
    assert await client.service(Plain).ping() == "pong"
    plain.end()
    assert await plain.finished() == 0


async def test_a_service_that_cannot_start_says_why_in_one_line(
    nats: BusAddress, tmp_path: Path, stack: AsyncExitStack
) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY, "--Moody.start=refused")
    moody = await server.start("Moody")
    assert await moody.finished() == 2
    failed = await server.hears("Moody", "failed")
    assert failed.detail == "no such model; name another"
    await moody.says("second hook")
    assert moody.errors == ["error: no such model; name another"]
    assert not [presence for presence in server.heard if presence.state == "ready"]


async def test_an_unexpected_error_is_one_line_after_its_traceback(
    nats: BusAddress, tmp_path: Path, stack: AsyncExitStack
) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY, "--Moody.start=broken")
    moody = await server.start("Moody")
    assert await moody.finished() == 1
    assert (await server.hears("Moody", "failed")).detail == "ValueError: two lines"
    await moody.says("second hook")
    assert moody.errors == ["error: ValueError: two lines"]
    assert any(line.startswith("Traceback") for line in moody.output)


async def test_a_side_task_that_dies_ends_the_process(nats: BusAddress, tmp_path: Path, stack: AsyncExitStack) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY)
    moody = await server.start("Moody")
    await server.hears("Moody", "ready")
    await (await server.client()).service(Moody).die()
    assert await moody.finished() == 1
    assert (await server.hears("Moody", "failed")).detail == "the engine died; see its log"
    await moody.says("second hook")
    assert moody.errors == ["error: the engine died; see its log"]


async def test_a_side_task_that_dies_while_the_process_ends_is_told_of_at_once(
    nats: BusAddress, tmp_path: Path, stack: AsyncExitStack
) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY, "--Moody.later=task dies at the end")
    moody = await server.start("Moody")
    await server.hears("Moody", "ready")
    moody.end()
    assert (await server.hears("Moody", "failed")).detail == "the engine died; see its log"
    assert await moody.finished() == 1
    await moody.says("second hook")
    assert moody.errors == ["error: the engine died; see its log"]


async def test_a_hook_that_fails_does_not_keep_the_next_from_running(
    nats: BusAddress, tmp_path: Path, stack: AsyncExitStack
) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY, "--Moody.later=bad end")
    moody = await server.start("Moody")
    await server.hears("Moody", "ready")
    moody.end()
    assert await moody.finished() == 1
    await moody.says("second hook")
    assert moody.errors == ["error: the engine would not end"]


async def test_being_told_to_end_while_starting_is_honoured(
    nats: BusAddress, tmp_path: Path, stack: AsyncExitStack
) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY, "--Moody.start=never")
    moody = await server.start("Moody")
    await moody.says("starting")
    moody.end()
    assert await moody.finished() == 0
    await moody.says("second hook")
    assert moody.errors == []


async def test_a_revoked_lease_ends_the_process_that_holds_it(
    nats: BusAddress, tmp_path: Path, stack: AsyncExitStack
) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY)
    moody = await server.start("Moody")
    ready = await server.hears("Moody", "ready")
    revoked = Subjects(server.graph.namespace).revoked
    await server.bus.send(revoked, LeaseRevoked("somebody else's"))
    moody_client = (await server.client()).service(Moody)
    assert {await moody_client.lease() for _ in range(20)} == {ready.lease}
    assert not [presence for presence in server.heard if presence.state == "draining"]
    await server.bus.send(revoked, LeaseRevoked(ready.lease))
    await server.hears("Moody", "draining")
    assert await moody.finished() == 0


def only_reserved(state: State) -> State:
    """Reserve again what was claimed, as if the claims had been lost with a damaged statefile."""
    for component in state.components.values():
        state = unclaim(state, component.watcher)
    return state


def unclaimed(state: State) -> State:
    """Release all claims, as if the workers had been removed while they were starting."""
    for component in state.components.values():
        state = release(state, component.watcher)
    return state


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (lambda paths: paths.graph_file.unlink(), "error: no graph in .*graph.json: No such file"),
        (lambda paths: paths.graph_file.write_bytes(b"{}"), "error: not a resolved graph"),
        (lambda paths: paths.bus_file.unlink(), "error: no bus address in .*bus.json"),
        (lambda paths: StateStore(paths).remove(), "error: no server runs in namespace"),
        (lambda paths: StateStore(paths).update(unclaimed), "error: .*_Moody holds nothing"),
        (lambda paths: StateStore(paths).update(only_reserved), "error: .*_Moody is only reserved"),
    ],
)
async def test_without_its_server_a_process_ends_in_one_line(
    nats: BusAddress,
    tmp_path: Path,
    stack: AsyncExitStack,
    break_: Callable[[StatePaths], None],
    message: str,
) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY)
    break_(server.paths)
    moody = await server.start("Moody")
    assert await moody.finished() != 0
    await until(lambda: bool(moody.errors))
    assert len(moody.errors) == 1
    assert re.match(message, moody.errors[0])
    assert not [line for line in moody.output if line.startswith("Traceback")]


async def test_a_process_follows_the_role_of_the_one_before_it_and_writes_nothing_down(
    nats: BusAddress, tmp_path: Path, stack: AsyncExitStack
) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY)
    watcher = str(Watcher(server.graph.namespace, "Moody"))
    server.store.update(lambda state: set_role(with_process(state, watcher, "old", 1), watcher, "old", "kept"))
    files = (server.paths.statefile, server.paths.state_copy)
    before = [(path.stat().st_ino, path.read_bytes()) for path in files]
    lock = FileLock(server.paths.update_lock)
    lock.acquire(1.0)
    moody = await server.start("Moody")
    await server.hears("Moody", "ready")
    moody.end()
    assert await moody.finished() == 0
    assert {presence.role for presence in server.heard if presence.watcher == watcher} == {"kept"}
    assert [(path.stat().st_ino, path.read_bytes()) for path in files] == before
    lock.release(remove=False)


async def test_a_watcher_of_another_service_is_refused(nats: BusAddress, tmp_path: Path, stack: AsyncExitStack) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY)
    moody = await server.start("Moody", DYN_WATCHER="other_Plain")
    assert await moody.finished() == 2
    await until(lambda: bool(moody.errors))
    assert "other_Plain, which is no watcher of Moody" in moody.errors[0]


async def test_no_process_survives_its_parent(nats: BusAddress, tmp_path: Path, stack: AsyncExitStack) -> None:
    server = await prepare(nats, tmp_path, stack, MOODY)
    code = "import os, subprocess, sys; os.environ['DYN_PARENT_PID'] = str(os.getpid()); subprocess.run(sys.argv[1:])"
    environment = {
        **os.environ,
        STATE_DIR_VARIABLE: str(tmp_path),
        "DYN_WATCHER": str(Watcher(server.graph.namespace, "Moody")),
    }
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *command(server.graph.namespace, "Moody"), env=environment
    )
    ready = await server.hears("Moody", "ready")
    parent.kill()
    await parent.wait()
    await until(lambda: not _runs(ready.pid))


def _runs(pid: int) -> bool:
    """Whether the process does something; a zombie waiting for its new parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_hello_world_streams_through_all_three(nats: BusAddress, tmp_path: Path, stack: AsyncExitStack) -> None:
    server = await prepare(nats, tmp_path, stack, HELLO, "--Middle.suffix=!")
    processes = [await server.start(name, DYN_HTTP_PORT="0") for name in ("Backend", "Middle", "Frontend")]
    for name in ("Backend", "Middle", "Frontend"):
        await server.hears(name, "ready")
    expected = ["Frontend: Middle: Backend: hello", "Frontend: Middle: Backend: world!"]
    frontend = (await server.client()).service(Frontend)
    assert [reply async for reply in frontend.generate("hello world")] == expected

    url = (await server.hears("Frontend", "ready")).url
    assert url is not None
    status, body = await get(f"{url}/generate?text=hello+world")
    assert (status, body.splitlines()) == (200, expected)

    backend = processes[0]
    backend.end()
    assert await backend.finished() == 0
    status, body = await get(f"{url}/generate?text=hello")
    assert status == 503
    assert "Backend.generate cannot be called: no instance of the service is ready" in body
    for process in reversed(processes[1:]):
        process.end()
        assert await process.finished() == 0


async def get(url: str) -> tuple[int, str]:
    """Status and body, by a client that knows HTTP better than the example's server."""

    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)
