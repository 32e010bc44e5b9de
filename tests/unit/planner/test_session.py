"""When a planner begins: it would add workers a second time that are only coming."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.planner import session as module
from dynamo_local.planner.session import PlannerSession
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from state.devices.allocation import Inventory
from state.paths import StatePaths
from state.record import ServerRecord, write_record

BLUEPRINT = Blueprint("pipe", "/", Inventory("cpu-slot", ()), (), 60.0, 60.0)


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    paths = StatePaths(tmp_path, "test")
    paths.run_dir.mkdir(mode=0o700)
    BLUEPRINT.write(paths.blueprint_file)
    write_record(paths, ServerRecord("starting"))
    return paths


async def test_by_hand_it_is_refused_while_the_server_starts_unless_it_only_observes(paths: StatePaths) -> None:
    by_hand = PlannerSession(paths, PlannerOptions(no_operation=False), tuple)
    with pytest.raises(SupervisorError, match="is only starting; `dynamo wait` waits"):
        await by_hand._blueprint()
    observing = replace(by_hand, options=PlannerOptions(no_operation=True))
    assert await observing._blueprint() == BLUEPRINT
    write_record(paths, ServerRecord("running"))
    assert await by_hand._blueprint() == BLUEPRINT


async def test_as_a_service_it_waits_until_all_of_the_server_was_ready(
    paths: StatePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    begun = asyncio.create_task(PlannerSession(paths, PlannerOptions(), tuple, "test_Planner")._blueprint())
    assert not (await asyncio.wait({begun}, timeout=0.1))[0]
    write_record(paths, ServerRecord("running"))
    async with asyncio.timeout(60):
        assert await begun == BLUEPRINT
