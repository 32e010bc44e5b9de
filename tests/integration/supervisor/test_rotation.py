"""The token of NATS replaced while streams run, on real circus and NATS with mockers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, BusRefusedError
from tests.integration.server_process import PATIENCE_S, eventually
from tests.integration.supervisor.answered_streams import GRAPH, MOCKERS, address, streams, until_answered
from tests.integration.supervisor.scaled_server import NAMESPACE, ScaledServer

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScaledServer]:
    """A decode worker and a prefill worker, for all tests that leave them as they are. The bus is one between machines,
    by TLS; tests/integration/bus/test_renewal.py is without."""
    root = tmp_path_factory.mktemp("rotation") / "state"
    with ScaledServer(root, GRAPH, *MOCKERS, "--bus-host=127.0.0.2") as server:
        assert address(server).wants_tls
        yield server


async def rotate(server: ScaledServer) -> dict[str, object]:
    code, out, err = await asyncio.to_thread(server.command, "rotate-token", "--json")
    assert code == 0, err
    found: dict[str, object] = json.loads(out)
    return found


def nats_pid(server: ScaledServer) -> int:
    """The statefile knows it of the first process alone."""
    (pid,) = (each.pid for each in server.processes() if each.environ["DYN_WATCHER"] == f"{NAMESPACE}_Nats")
    return pid


async def refused(former: BusAddress) -> None:
    with pytest.raises(BusRefusedError, match="refuses the token"):
        await Bus.connect(former, name="stranger")


async def test_streams_run_through_a_rotation_and_no_process_is_restarted(server: ScaledServer) -> None:
    pids = {name: server.pid(name) for name in ("Front", "VllmWorker", "PrefillWorker")}
    nats = nats_pid(server)
    # Tests of the same server may have come before.
    _, out, _ = await asyncio.to_thread(server.command, "events", "--kind", "secret")
    told = out.count("the token of NATS was replaced")
    async with streams(server, 16) as frontend:
        await until_answered(frontend, 8)
        for _ in range(2):
            former = address(server)
            assert await rotate(server) == {"processes": 4, "disconnected": []}
            assert address(server).token != former.token
            await refused(former)
            await until_answered(frontend, 16)
    assert {name: server.pid(name) for name in pids} == pids
    assert nats_pid(server) == nats
    code, out, _ = await asyncio.to_thread(server.command, "events", "--kind", "secret")
    assert (code, out.count("the token of NATS was replaced") - told) == (0, 2)
    token = address(server).token
    assert token is not None
    assert token not in out + server.output
    assert stat.S_IMODE(server.paths.bus_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.paths.nats_config.stat().st_mode) == 0o600
    assert (await asyncio.to_thread(server.command, "restart", "PrefillWorker"))[0] == 0
    assert (await asyncio.to_thread(server.command, "ps"))[0] == 0


async def test_a_process_that_hangs_meanwhile_comes_back_by_itself(server: ScaledServer) -> None:
    pid, former = server.pid("VllmWorker"), address(server)
    async with streams(server, 4, loses_state=True) as frontend:
        await until_answered(frontend, 4)
        os.kill(pid, signal.SIGSTOP)
        try:
            await rotate(server)
        finally:
            os.kill(pid, signal.SIGCONT)
        await refused(former)
        await until_answered(frontend, 8)
    assert server.pid("VllmWorker") == pid


@pytest.mark.parametrize("after_s", [0.0, 0.5])
async def test_nats_killed_during_a_rotation_costs_no_request(server: ScaledServer, after_s: float) -> None:
    """At which step the kill comes depends on the machine."""
    former = address(server)
    async with streams(server, 8) as frontend:
        await until_answered(frontend, 8)
        config = server.paths.nats_config.read_bytes()
        rotating = asyncio.create_task(rotate(server))
        async with asyncio.timeout(PATIENCE_S):
            while server.paths.nats_config.read_bytes() == config:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(after_s)
        os.kill(nats_pid(server), signal.SIGKILL)
        await rotating
        await refused(former)
        await until_answered(frontend, 8)


def test_a_server_killed_during_a_rotation_is_followed_by_another(tmp_path: Path, nats_address: BusAddress) -> None:
    """The other one uses a NATS server of somebody else, which keeps its token."""
    with ScaledServer(tmp_path / "state", GRAPH, *MOCKERS) as server:
        config = server.paths.nats_config.read_bytes()
        rotating = server.begin("rotate-token")
        eventually(lambda: server.paths.nats_config.read_bytes() != config, "no rotation began")
        server.process.kill()
        rotating.kill()
        rotating.communicate()
        eventually(lambda: server.processes() == (), "processes outlive their server")
    url = nats_address.url.replace("nats://", f"nats://{nats_address.user}:{nats_address.token}@")
    with ScaledServer(tmp_path / "state", GRAPH, *MOCKERS, f"--nats-url={url}") as server:
        code, out, err = server.command("rotate-token")
        assert (code, out) == (1, "")
        assert "the NATS server was not started by this server; replace the token there" in err


async def test_a_rotation_that_fails_leaves_the_token_as_it_was(server: ScaledServer) -> None:
    """The disk takes no file of the address."""
    blocked = server.paths.bus_file.with_name("bus.json.tmp")
    blocked.mkdir()
    before = address(server)
    code, _, err = await asyncio.to_thread(server.command, "rotate-token")
    assert (code, "cannot write" in err) == (1, True), err
    assert address(server) == before
    assert before.user is not None
    eventually(lambda: server.paths.nats_config.read_text().count('"user"') == 1, "the configuration is not put back")
    blocked.rmdir()
    await rotate(server)
    with pytest.raises(BusError):
        await Bus.connect(before, name="stranger")
