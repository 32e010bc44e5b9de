"""Workers that come and go, with real circus, real NATS and mockers: by commands, which may die at any moment and leave
to the server what they have ordered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import RESTART_WORKERS, STOP
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from state.machine.processes import start_time
from state.statefile.store import StateStore
from state.statefile.transitions import retire
from tests.chaos.answers import Outcome
from tests.chaos.frontend import ChaosFrontend
from tests.chaos.settings import BLOCK_SIZE
from tests.integration.server_process import PATIENCE_S, eventually
from tests.integration.supervisor.scaled_server import DIES, HANGS, NAMESPACE, ScaledServer, phase_of

pytestmark = pytest.mark.integration

INITIAL = {"VllmWorker": (0,), "PrefillWorker": (1,)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScaledServer]:
    with ScaledServer(tmp_path / "state") as server:
        yield server


def ordered_and_killed(server: ScaledServer, *arguments: str) -> None:
    """Begin a command, and kill it as soon as a change is under way."""
    command = server.begin(*arguments)
    eventually(lambda: not server.settled() or command.poll() is not None, "no change began")
    command.kill()
    command.communicate()


def test_the_statefile_has_the_documented_states_and_added_workers_end_with_the_server(server: ScaledServer) -> None:
    assert server.workers() == INITIAL
    code, _, err = server.command("scale", "VllmWorker=3")
    assert (code, server.workers()) == (0, INITIAL | {"VllmWorker_1": (2,), "VllmWorker_2": (3,)}), err
    added = server.entry("VllmWorker_1")
    assert added is not None
    assert (added.cmd, added.role) == (server.state().components[f"{NAMESPACE}_VllmWorker"].cmd, "decode")
    code, _, err = server.command("scale", "VllmWorker=2")
    assert (code, server.workers()) == (0, INITIAL | {"VllmWorker_1": (2,)}), err
    code, _, err = server.command("drain", f"{NAMESPACE}_VllmWorker")
    assert (code, server.workers()) == (0, {"VllmWorker": None, "PrefillWorker": (1,), "VllmWorker_1": (2,)}), err
    # The unsuffixed entry comes first again.
    code, out, err = server.command("scale", "VllmWorker=2", "PrefillWorker=2", "--json")
    assert code == 0, err
    assert [(o["watcher"], o["done"]) for o in json.loads(out)] == [
        (f"{NAMESPACE}_VllmWorker", True),
        (f"{NAMESPACE}_PrefillWorker_1", True),
    ]
    assert server.workers() == INITIAL | {"VllmWorker_1": (2,), "PrefillWorker_1": (3,)}
    assert server.consistent()
    _, out, _ = server.command("ps", "--json")
    assert {row["state"] for row in json.loads(out)} == {"ready"}
    server.ends_well()


def test_what_cannot_be_had_is_refused_and_the_last_one_is_kept(server: ScaledServer) -> None:
    for arguments, why in (
        (["scale", "VllmWorker=4"], "that takes 5 devices, and there are 4 CPU slots"),
        (["scale", "Front=2"], "'Front' is not a service of workers; those of this graph are: VllmWorker, Prefill"),
        (["scale", "VllmWorker=-1"], "'VllmWorker=-1' does not say how many"),
        (["scale", "VllmWorker=0"], "no worker would be left to answer requests without scaled_VllmWorker"),
        (["drain", "scaled_VllmWorker"], "no worker would be left to answer requests"),
        (["drain", "scaled_Front"], "there is no worker 'scaled_Front'; there are: VllmWorker, PrefillWorker"),
    ):
        code, out, err = server.command(*arguments)
        assert (code, out) == (2, ""), err
        assert why in err
    assert server.workers() == INITIAL
    assert server.command("scale", "PrefillWorker=0")[0] == 0
    assert server.command("scale", "VllmWorker=0", "--force")[0] == 0
    assert server.workers() == {"VllmWorker": None, "PrefillWorker": None}
    assert server.command("scale", "VllmWorker=1", "PrefillWorker=1")[0] == 0
    assert server.workers() == INITIAL
    server.ends_well()


def test_a_worker_that_dies_on_start_is_taken_back_and_the_server_goes_on(server: ScaledServer) -> None:
    made = server.state().components[f"{NAMESPACE}_VllmWorker"]
    server.workers_are_made_by(DIES)
    code, out, err = server.command("scale", "VllmWorker=2")
    assert code == 1, out
    assert err.strip() == (f"error: {NAMESPACE}_VllmWorker_1 did not start: it ended: no memory left on the device")
    assert server.workers() == INITIAL
    assert server.consistent()
    # The server still keeps the others.
    os.kill(server.pid("VllmWorker"), signal.SIGKILL)
    server.line("VllmWorker", "restart in")
    server.line("VllmWorker  ready")
    again = server.state().components[f"{NAMESPACE}_VllmWorker"]
    assert (again.devices, again.cmd) == (made.devices, made.cmd)
    server.ends_well()


def test_a_worker_that_hangs_on_start_is_taken_back_at_its_deadline(server: ScaledServer) -> None:
    server.workers_are_made_by(HANGS)
    code, _, err = server.command("scale", "VllmWorker=2", "--ready-timeout=1")
    assert (code, "did not start: not ready within 1 s" in err) == (1, True)
    assert server.workers() == INITIAL
    assert server.consistent()
    server.ends_well()


def test_the_server_carries_out_to_the_end_what_a_killed_command_has_ordered(server: ScaledServer) -> None:
    ordered_and_killed(server, "scale", "VllmWorker=3")
    wanted = INITIAL | {"VllmWorker_1": (2,), "VllmWorker_2": (3,)}
    eventually(lambda: server.workers() == wanted and server.consistent(), "the order is lost")
    ordered_and_killed(server, "drain", f"{NAMESPACE}_PrefillWorker")
    eventually(lambda: server.workers()["PrefillWorker"] is None and server.consistent(), "the order is lost")
    server.ends_well()


def test_an_interrupted_command_says_that_the_server_goes_on(server: ScaledServer) -> None:
    phase = phase_of(server, "VllmWorker_1")
    command = server.begin("scale", "VllmWorker=3")
    eventually(lambda: phase() == "starting" or command.poll() is not None, "nothing was claimed")
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=PATIENCE_S)
    assert (command.returncode, err.strip(), "the server goes on with it" in out) == (130, "", True)
    wanted = INITIAL | {"VllmWorker_1": (2,), "VllmWorker_2": (3,)}
    eventually(lambda: server.workers() == wanted and server.consistent(), "the order is lost")
    server.ends_well()


def test_an_order_that_is_given_again_is_carried_out_once(server: ScaledServer) -> None:
    client, before = ControlClient(server.paths), server.pid("VllmWorker")
    fields = {"id": "once", "name": "VllmWorker"}
    answers = [client.do(RESTART_WORKERS, fields) for _ in range(2)]
    assert {answer["id"] for answer in answers} == {"once"}
    eventually(lambda: client.do(RESTART_WORKERS, fields)["state"] == "done", "it does not end")
    assert server.workers() == {"VllmWorker": None, "PrefillWorker": (1,), "VllmWorker_1": (2,)}
    assert start_time(before) is None
    assert client.do(STOP, {"hurry": True})["phase"] == "stopping"
    assert server.end() == 0, server.output
    server.assert_nothing_left()


def test_a_worker_that_retires_is_not_started_again(server: ScaledServer) -> None:
    name, hanging = f"{NAMESPACE}_VllmWorker", f"{NAMESPACE}_VllmWorker_1"
    # As if an order were at it: while another change is under way, the server leaves it alone.
    server.workers_are_made_by(HANGS)
    command = server.begin("scale", "VllmWorker=2")
    eventually(lambda: hanging in server.watchers(), "nothing was started")
    StateStore(server.paths).update(lambda state: retire(state, name))
    _, out, _ = server.command("ps", "--json")
    assert next(row["state"] for row in json.loads(out) if row["watcher"] == name) == "retiring"
    os.kill(server.pid("VllmWorker"), signal.SIGKILL)
    eventually(lambda: server.state().components[name].lease is None, "its end is not noticed")
    # The other one dies later, and is back: so this one would have been, too.
    os.kill(server.pid("PrefillWorker"), signal.SIGKILL)
    server.line("PrefillWorker", "restart in")
    server.line("PrefillWorker  ready")
    assert server.watchers()[name] == "stopped"
    (process,) = (one for one in server.processes() if one.environ["DYN_WATCHER"] == hanging)
    os.kill(process.pid, signal.SIGKILL)
    command.communicate(timeout=PATIENCE_S)
    eventually(lambda: server.workers()["VllmWorker"] is None, "nobody finishes it")
    assert name not in server.watchers()
    server.ends_well()


def test_two_commands_take_turns(server: ScaledServer) -> None:
    commands = [server.begin("scale", target) for target in ("VllmWorker=2", "PrefillWorker=2")]
    for command in commands:
        _, err = command.communicate(timeout=PATIENCE_S)
        assert command.returncode == 0, err
    workers = server.workers()
    assert set(workers) == {"VllmWorker", "VllmWorker_1", "PrefillWorker", "PrefillWorker_1"}
    assert {workers["VllmWorker_1"], workers["PrefillWorker_1"]} == {(2,), (3,)}
    server.ends_well()


def test_a_server_that_ends_does_not_wait_for_a_worker_that_starts(server: ScaledServer) -> None:
    server.workers_are_made_by(HANGS)
    command = server.begin("scale", "VllmWorker=2")
    eventually(lambda: f"{NAMESPACE}_VllmWorker_1" in server.watchers(), "nothing was started")
    server.ends_well()
    _, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 1
    assert err.startswith("error: the server "), err
    assert "Traceback" not in err


def test_a_server_that_is_killed_takes_added_workers_with_it(server: ScaledServer, tmp_path: Path) -> None:
    assert server.command("scale", "VllmWorker=2")[0] == 0
    added = server.entry("VllmWorker_1")
    assert added is not None
    assert added.pid is not None
    pid = added.pid
    server.signal(signal.SIGKILL)
    server.process.wait()
    eventually(lambda: start_time(pid) is None, "it outlives the server")
    code, _, err = server.command("scale", "VllmWorker=3")
    assert (code, "no server runs in namespace scaled" in err) == (2, True)


async def test_no_request_fails_while_workers_come_and_go(tmp_path: Path) -> None:
    options = ["--VllmWorker.mocker-step-base-ms=10", f"--VllmWorker.mocker-block-size={BLOCK_SIZE}"]
    with ScaledServer(tmp_path / "state", "tests.chaos.graph:Router", *options) as server:
        bus = await Bus.connect(BusAddress.load(server.paths.bus_file), name="test")
        frontend = ChaosFrontend(bus, Subjects(NAMESPACE, FIRST_OF_MAIN), f"{NAMESPACE}_Frontend", stall_s=PATIENCE_S)
        await frontend.start()
        frontend.open_streams(12, "scaling")
        for arguments in (
            ["scale", "VllmWorker=3"],
            ["drain", f"{NAMESPACE}_VllmWorker"],
            ["scale", "VllmWorker=1"],
        ):
            answered = frontend.results.right
            code, _, err = await asyncio.to_thread(server.command, *arguments)
            assert code == 0, err
            async with asyncio.timeout(PATIENCE_S):
                while frontend.results.right < answered + 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        assert server.workers() == {"VllmWorker": None, "VllmWorker_1": (1,)}
        assert await frontend.close_streams(PATIENCE_S) == 0
        results = frontend.results
        assert results.failures == []
        assert Outcome.STATE_LOST.value not in results.outcomes
        await frontend.tasks.close()
        await bus.close()
        await asyncio.to_thread(server.ends_well)
