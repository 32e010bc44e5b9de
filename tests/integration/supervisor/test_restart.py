"""Processes restarted while streams run, on real circus and NATS with mockers; and what becomes of their KV."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from tests.chaos.answers import Outcome
from tests.chaos.frontend import ChaosFrontend
from tests.chaos.settings import BLOCK_SIZE
from tests.integration.server_process import PATIENCE_S, eventually
from tests.integration.supervisor.scaled_server import DIES, NAMESPACE, ScaledServer

pytestmark = pytest.mark.integration

MOCKERS = [
    f"--{service}.{option}"
    for service in ("VllmWorker", "PrefillWorker")
    for option in ("engine=mocker", "mocker-step-base-ms=10", f"mocker-block-size={BLOCK_SIZE}")
]
TWO_DECODERS = [*MOCKERS, "--VllmWorker.ServiceArgs.workers=2"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScaledServer]:
    """A decode worker on slot 0, a prefill worker on slot 1, and two free slots."""
    with ScaledServer(tmp_path / "state") as server:
        yield server


def restarted(server: ScaledServer, *arguments: str) -> list[str]:
    """The watchers that work afterwards."""
    code, out, err = server.command("restart", *arguments, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert all(outcome["done"] and outcome["action"] == "Restart" for outcome in found)
    return [outcome["watcher"].removeprefix(f"{NAMESPACE}_") for outcome in found]


def test_a_new_worker_comes_first_where_a_device_is_free_and_in_place_where_none_is(server: ScaledServer) -> None:
    assert restarted(server, "VllmWorker") == ["VllmWorker_1"]
    assert server.workers() == {"VllmWorker": None, "VllmWorker_1": (2,), "PrefillWorker": (1,)}
    assert server.command("scale", "VllmWorker=3")[0] == 0
    full = {"VllmWorker": (0,), "VllmWorker_1": (2,), "VllmWorker_2": (3,), "PrefillWorker": (1,)}
    assert server.workers() == full
    before = {name: server.pid(name) for name in full}
    assert restarted(server, "VllmWorker") == ["VllmWorker", "VllmWorker_1", "VllmWorker_2"]
    assert restarted(server, f"{NAMESPACE}_PrefillWorker") == ["PrefillWorker"]
    assert server.workers() == full
    assert not {server.pid(name) for name in full} & set(before.values())
    assert server.consistent()
    server.ends_well()


def test_what_cannot_be_restarted_is_refused(server: ScaledServer) -> None:
    before = server.state()
    for arguments, why in (
        (["Front"], "Front holds the clients' connections, which a restart would cut; end the server with"),
        ([f"{NAMESPACE}_Front"], "Front holds the clients' connections"),
        (
            ["Nothing"],
            "there is no service, endpoint or watcher 'Nothing'; there are: VllmWorker, PrefillWorker, Front",
        ),
        ([f"{NAMESPACE}_Nats"], "there is no service, endpoint or watcher"),
    ):
        code, out, err = server.command("restart", *arguments)
        assert (code, out) == (2, ""), err
        assert why in err
    assert server.state() == before
    assert server.command("scale", "VllmWorker=0", "--force")[0] == 0
    code, _, err = server.command("restart", "VllmWorker")
    assert (code, "VllmWorker has no workers; `dynamo scale VllmWorker=1` starts one" in err) == (2, True)


def test_a_successor_that_does_not_start_leaves_everything_as_it_was(server: ScaledServer) -> None:
    before = server.state().components
    server.workers_are_made_by(DIES)
    code, _, err = server.command("restart", "VllmWorker")
    assert (code, "VllmWorker_1 did not start: it ended: no memory left on the device" in err) == (1, True)
    assert server.state().components == before
    assert server.consistent()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_service_is_restarted_to_the_end_though_its_command_is_killed(server: ScaledServer, workers: int) -> None:
    """One decode worker leaves a device free for its successor; three leave none."""
    if workers == 3:
        assert server.command("scale", "VllmWorker=3")[0] == 0
    before = decoders(server)
    command = server.begin("restart", "VllmWorker")
    eventually(lambda: not server.settled() or command.poll() is not None, "no change began")
    command.kill()
    command.communicate()
    eventually(lambda: server.consistent() and not before & decoders(server), "some were not restarted")
    assert len(decoders(server)) == len(before) == workers
    server.ends_well()


def decoders(server: ScaledServer) -> set[int | None]:
    """Pids of the workers that decode."""
    found = server.state().components.values()
    return {component.pid for component in found if component.component == "VllmWorker" and component.holds}


@asynccontextmanager
async def streams(server: ScaledServer, count: int) -> AsyncIterator[ChaosFrontend]:
    """Clients that ask on and on; not one of them may get a wrong answer, or none."""
    bus = await Bus.connect(BusAddress.load(server.paths.bus_file), name="test")
    frontend = ChaosFrontend(bus, Subjects(NAMESPACE, FIRST_OF_MAIN), f"{NAMESPACE}_Frontend", stall_s=PATIENCE_S)
    await frontend.start()
    frontend.open_streams(count, "restart")
    try:
        yield frontend
        assert await frontend.close_streams(PATIENCE_S) == 0
        assert frontend.results.failures == []
        assert Outcome.STATE_LOST.value not in frontend.results.outcomes
    finally:
        await frontend.tasks.close()
        await bus.close()


async def test_requests_move_with_their_kv_whoever_makes_a_worker_go(tmp_path: Path) -> None:
    """The planner removes workers by the same change as `dynamo scale`."""
    with ScaledServer(tmp_path / "state", "tests.integration.supervisor.roles_graph:Front", *TWO_DECODERS) as server:
        async with streams(server, 24) as frontend:
            migrations = frontend.dispatcher.migrations.statistics
            for reason, arguments in (
                ("drain", ["restart", f"{NAMESPACE}_VllmWorker"]),
                (None, ["scale", "VllmWorker=3"]),
                ("drain", ["restart", "VllmWorker"]),
                ("drain", ["scale", "VllmWorker=2"]),
                ("drain", ["drain", f"{NAMESPACE}_VllmWorker"]),
                (None, ["scale", "VllmWorker=2"]),
                ("role", ["role", f"{NAMESPACE}_VllmWorker", "prefill"]),
            ):
                moved, pulled, answered = Counter(migrations.outcomes), migrations.pulled_tokens, frontend.results.right
                code, _, err = await asyncio.to_thread(server.command, *arguments)
                assert code == 0, err
                async with asyncio.timeout(PATIENCE_S):
                    while frontend.results.right < answered + 24:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                if reason is not None:
                    assert migrations.outcomes["migrated", reason] > moved["migrated", reason], arguments
                    assert migrations.pulled_tokens > pulled, arguments
        await asyncio.to_thread(server.ends_well)


async def test_requests_wait_for_nobody_while_the_router_is_restarted(tmp_path: Path) -> None:
    options = ["--VllmWorker.mocker-step-base-ms=10", f"--VllmWorker.mocker-block-size={BLOCK_SIZE}"]
    with ScaledServer(tmp_path / "state", "tests.integration.supervisor.routed_graph:Front", *options) as server:
        before = server.pid("Router")
        async with streams(server, 8) as frontend:
            assert await asyncio.to_thread(restarted, server, "Router") == ["Router"]
            answered = frontend.results.right
            async with asyncio.timeout(PATIENCE_S):
                while frontend.results.right < answered + 8:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        assert server.pid("Router") != before
        await asyncio.to_thread(server.ends_well)
