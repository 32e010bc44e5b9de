"""The planner on a real server, circus, NATS and mockers: workers come with the load and go with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.reports import PlannerReport
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from tests.chaos.frontend import ChaosFrontend
from tests.chaos.settings import BLOCK_SIZE
from tests.integration.server_process import PATIENCE_S, eventually
from tests.integration.supervisor.scaled_server import NAMESPACE, ScaledServer

pytestmark = pytest.mark.integration

AGG = "tests.integration.monitoring.planned_agg:Front"
DISAGG = "tests.integration.monitoring.planned_disagg:Front"
QUICK = ("--adjustment-interval=0.6", "--metric-pulling-interval=0.1", "--change-timeout=120")
STREAMS = 12
"""Three times what a worker runs at once here."""


def mockers(*services: str) -> tuple[str, ...]:
    keys = {"engine": "mocker", "mocker-max-num-seqs": 4, "mocker-block-size": BLOCK_SIZE, "mocker-step-base-ms": 20.0}
    return tuple(f"--{service}.{key}={value}" for service in services for key, value in keys.items())


def acting(**more: object) -> tuple[str, ...]:
    """Options of a planner service that acts soon."""
    quick = tuple(f"--Planner.{option.removeprefix('--')}" for option in QUICK)
    return (*quick, "--Planner.no-operation=false", *(f"--Planner.{key}={value}" for key, value in more.items()))


@asynccontextmanager
async def frontend_of(server: ScaledServer, max_local_prefill: int | None = None) -> AsyncIterator[ChaosFrontend]:
    """Clients of the server, none of which may get a wrong answer."""
    bus = await Bus.connect(BusAddress.load(server.paths.bus_file), name="test")
    frontend = ChaosFrontend(
        bus, Subjects(NAMESPACE, FIRST_OF_MAIN), f"{NAMESPACE}_Frontend_1", 60.0, max_local_prefill
    )
    await frontend.start()
    yield frontend
    assert await frontend.close_streams(PATIENCE_S) == 0
    assert frontend.results.failures == []
    await frontend.tasks.close()
    await bus.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(eventually, condition, what)


def role_of(server: ScaledServer, name: str) -> str | None:
    entry = server.entry(name)
    return None if entry is None else entry.role


def planner_after(server: ScaledServer, killed: int) -> bool:
    entry = server.entry("Planner")
    return entry is not None and entry.pid not in (None, killed)


def decisions(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_an_aggregated_graph_grows_with_its_load_and_shrinks_again(tmp_path: Path) -> None:
    options = (*mockers("VllmWorker"), *acting())
    with ScaledServer(tmp_path / "state", AGG, *options) as server:
        async with frontend_of(server) as frontend:
            frontend.open_streams(STREAMS, "up and down")
            await until(lambda: len(server.workers()) >= 3, "no worker was added")
        await until(lambda: set(server.workers()) == {"VllmWorker"}, "the workers that were added stay")
        told = decisions(server.paths.decisions_file)
        added = next(line for line in told if line["actions"])
        assert added["actions"] == [{"action": "AddWorker", "role": "aggregated", "component": "VllmWorker"}]
        assert (added["outcomes"][0]["done"], added["outcomes"][0]["watcher"]) == (True, f"{NAMESPACE}_VllmWorker_1")
        assert "above 0.9" in added["roles"][0]["reason"]
        assert added["roles"][0]["pressure"] > 0.9
        assert all(line["devices"] <= line["max_devices"] == 4 for line in told)
        event = next(one for one in decisions(server.paths.events_file) if one["kind"] == "scale")
        assert (event["watcher"], event["what"][:8]) == (f"{NAMESPACE}_VllmWorker_1", "added in")
        assert event["why"].startswith("planner: aggregated: ")
        await asyncio.to_thread(server.ends_well)


async def test_a_disaggregated_graph_adds_and_removes_workers_of_both_roles(tmp_path: Path) -> None:
    options = (*mockers("VllmWorker", "PrefillWorker"), *acting(), "--PrefillWorker.mocker-prefill-us-per-token=4000")
    with ScaledServer(tmp_path / "state", DISAGG, *options) as server:
        async with frontend_of(server, max_local_prefill=20) as frontend:
            frontend.open_streams(STREAMS, "both roles")
            # Whichever is short first takes the devices.
            await until(lambda: len(server.workers()) == 4, "no workers were added")
        await until(lambda: len(server.workers()) == 2, "the workers that were added stay")
        await asyncio.to_thread(server.ends_well)


async def test_by_default_the_planner_observes_and_records_what_it_would_do(tmp_path: Path) -> None:
    options = (*mockers("VllmWorker"), *(option for option in acting() if "no-operation" not in option))
    with ScaledServer(tmp_path / "state", AGG, *options) as server:
        bus = await Bus.connect(BusAddress.load(server.paths.bus_file), name="test")
        reports: list[PlannerReport] = []

        async def on_report(report: PlannerReport) -> None:
            reports.append(report)

        await bus.listen(Subjects(NAMESPACE).planner, PlannerReport, on_report)
        async with frontend_of(server) as frontend:
            frontend.open_streams(STREAMS, "observed")
            path = server.paths.decisions_file
            await until(lambda: any(line["actions"] for line in decisions(path)), "nothing would be done")
            await until(lambda: bool(reports and reports[-1].decisions), "the bus is not told")
        line = next(line for line in decisions(path) if line["actions"])
        assert (line["acts"], line["outcomes"]) == (False, [])
        assert set(server.workers()) == {"VllmWorker"}
        last = reports[-1]
        assert (last.acts, last.watcher, last.devices, last.max_devices) == (False, f"{NAMESPACE}_Planner", 1, 4)
        assert [(role.role, role.routable) for role in last.roles] == [("aggregated", 1)]
        await bus.close()


async def test_a_planner_that_is_killed_is_started_again_and_goes_on(tmp_path: Path) -> None:
    """Killed while an action is under way: its worker is finished or taken back, and no device is lost."""
    options = (*mockers("VllmWorker"), "--VllmWorker.mocker-start-s=1.5", *acting())
    with ScaledServer(tmp_path / "state", AGG, *options) as server:
        async with frontend_of(server) as frontend:
            frontend.open_streams(STREAMS, "killed")
            for _ in range(2):
                await until(lambda: not server.settled(), "no action began")
                killed = server.pid("Planner")
                os.kill(killed, signal.SIGKILL)
                await until(lambda killed=killed: planner_after(server, killed), "no planner is started")  # type: ignore[misc]
            await until(lambda: len(server.workers()) >= 3 and server.settled(), "no more workers were added")
        await until(lambda: len(server.workers()) == 1, "the workers that were added stay")
        await until(server.consistent, "statefile, circus and processes differ")
        await asyncio.to_thread(server.ends_well)


async def test_the_planner_command_acts_too_and_there_is_only_one(tmp_path: Path) -> None:
    with ScaledServer(tmp_path / "state", AGG, *mockers("VllmWorker")) as server:
        planner = server.begin("planner", *QUICK, f"--log-dir={tmp_path / 'log'}")
        try:
            async with frontend_of(server) as frontend:
                frontend.open_streams(STREAMS, "by hand")
                await until(lambda: len(server.workers()) >= 2, "no worker was added")
                code, _, err = await asyncio.to_thread(server.command, "planner", *QUICK)
                assert (code, f"process {planner.pid} is the planner of namespace" in err) == (2, True), err
            await until(lambda: len(server.workers()) == 1, "the worker that was added stays")
            planner.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(planner.wait, PATIENCE_S) == 0
            code, _, err = await asyncio.to_thread(server.command, "scale", "VllmWorker=3")
            assert code == 0, err
            code, _, err = await asyncio.to_thread(server.command, "planner", "--max-gpu-budget=2")
            assert (code, "max-gpu-budget is 2, and the workers hold 3 devices" in err) == (2, True), err
        finally:
            planner.kill()
            planner.communicate()
        assert any(line["actions"] for line in decisions(tmp_path / "log" / "decisions.jsonl"))
        assert list((tmp_path / "log").glob("*/events.out.tfevents.*"))


async def test_a_spare_prefill_worker_switches_its_role_and_keeps_its_process(tmp_path: Path) -> None:
    options = (*mockers("VllmWorker", "PrefillWorker"), "--PrefillWorker.ServiceArgs.workers=2")
    with ScaledServer(tmp_path / "state", "tests.integration.supervisor.roles_graph:Front", *options) as server:
        spare = server.entry("PrefillWorker_1")
        assert spare is not None
        async with frontend_of(server) as frontend:
            frontend.open_streams(STREAMS, "switched")
            await until(lambda: frontend.dispatcher.live_requests == STREAMS, "no load")
            planner = server.begin("planner", *QUICK, "--max-gpu-budget=3")
            try:
                await until(lambda: role_of(server, "PrefillWorker_1") == "decode", "its role is not switched")
                assert server.entry("PrefillWorker_1") == msgspec.structs.replace(spare, role="decode")
                path = server.paths.decisions_file
                await until(lambda: any(line["outcomes"] for line in decisions(path)), "nothing is told")
            finally:
                planner.terminate()
                planner.communicate()
        actions = [line["actions"] for line in decisions(path) if line["actions"]]
        switched = {
            "action": "SwitchRole",
            "watcher": f"{NAMESPACE}_PrefillWorker_1",
            "role": "prefill",
            "to": "decode",
        }
        assert actions[0] == [switched]


def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dynamo_local.cli.main import run

    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    assert run(["planner", "--decode-kv-scale-down-threshold=0.95"]) == 2
    assert capsys.readouterr().err.startswith("error: decode-kv-scale-down-threshold is 0.95")
    wrong = ["serve", AGG, "--dry-run", "--Planner.min-gpu-budget=9", "--cpu-slots=2"]
    assert run(wrong) == 2
    assert "min-gpu-budget must be at most max-gpu-budget" in capsys.readouterr().err
    assert run(["planner", "--namespace=nobody"]) == 2
    assert "no server runs in namespace nobody" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
