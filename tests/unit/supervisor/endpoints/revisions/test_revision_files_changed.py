"""A revision whose model's files have changed starts no worker: another revision is made, once, if it can be run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo_local.core.endpoints.rollout import Start
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import ConfigError
from dynamo_local.core.names import Revision
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.endpoints.revisions.launch import Launched, files_of, with_files
from dynamo_local.supervisor.endpoints.revisions.revision import RevisionRun
from dynamo_local.supervisor.endpoints.revisions.tools import RevisionTools
from dynamo_local.supervisor.places.capacity import MachineCapacity, MachineFacts
from state.devices.allocation import cpu_slots

CHAT = Revision("chat", 1)


class Launches:
    """A launcher whose launches fail with `error`; None: they succeed."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.launched = 0

    async def launch(self, revision: Revision, spec: EndpointSpec, progress: Callable[[str], None]) -> None:
        self.launched += 1
        if self.error is not None:
            raise self.error


def test_another_revision_is_made_once_for_files_that_can_be_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        launches = Launches()
        renewed: list[int] = []
        failed: list[str] = []
        weights = tmp_path / "weights"
        weights.write_text("old")

        async def renew(revision: Revision) -> None:
            renewed.append(revision.number)

        run = RevisionRun(CHAT, tools(launches, renew, failed.append), lambda: None)
        run.spec = EndpointSpec(name="chat", model=str(tmp_path))
        worker = ResolvedService("VllmWorker", "m:W", "aggregated", 1, 0, 0, {}, {"model": str(tmp_path)}, ())
        graph = ResolvedGraph("m:F", "ns", (worker,))
        files = files_of(graph)
        assert list(with_files(graph, files).services[0].envs.values()) == list(files.values())
        run.launched = Launched(graph, (), None, files)

        async def start() -> None:
            run.carry_out(Start(1, 1))
            assert run._task is not None
            await run._task

        weights.write_text("newer")
        launches.error = ConfigError("the model has no config.json")
        await start()
        launches.error = ValueError("two\nlines")
        await start()
        assert renewed == []
        assert failed[0] == "the model has no config.json"
        assert failed[1].endswith("they cannot be run: two lines")

        launches.error = None
        await start()
        assert renewed == [1]
        # That one has failed, and this one is ordered again.
        await start()
        assert (renewed, "have changed" in failed[-1]) == ([1], True)
        weights.write_text("newest")
        await start()
        assert renewed == [1, 1]

    asyncio.run(scenario())


def tools(launches: Launches, renew: Any, failed: Callable[[str], None]) -> RevisionTools:
    return RevisionTools(
        launcher=cast("Any", launches),
        memory=cast("Any", None),
        files=cast("Any", None),
        watch=cast("Any", None),
        given_up={},
        read_state=lambda: pytest.fail("nothing is looked at"),
        actuator=cast("Any", None),
        ask_to_park=cast("Any", None),
        on_failure=lambda revision, error: failed(error),
        renew=renew,
        capacity=MachineCapacity(cpu_slots([0], 1), MachineFacts()),
        spawn=lambda name, work: asyncio.get_running_loop().create_task(work, name=name),
        namespace="ns",
        frontend_deadline_s=1,
        drain_s=1,
    )
